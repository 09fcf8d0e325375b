"""Changes of addresses.c, each of which the driving program must notice (test_addresses_mutants.py)."""

from __future__ import annotations

MUTANTS = {
    "no wait for the device before a free": ("\terror = driver.cuCtxSynchronize();\n", "\terror = SUCCESS;\n"),
    "a resume that fails is not undone": ("if (error && segments[i].fresh &&", "if (false && segments[i].fresh &&"),
    "a resume that fails goes on": (
        "i < count && !error; i++) {\n\t\tsegments[i].fresh",
        "i < count; i++) {\n\t\tsegments[i].fresh",
    ),
    "the handle is kept at a yield": (
        "\tone->away = true;\n\treturn noted(driver.cuMemRelease(one->handle));",
        "\tone->away = true;\n\treturn SUCCESS;",
    ),
    "a failed mapping keeps its memory": (
        "\tnoted(driver.cuMemRelease(one->handle));\n\treturn error;",
        "\treturn error;",
    ),
    "a failed access keeps its mapping": ("\t\tnoted(driver.cuMemUnmap(one->address, one->size));\n", ""),
    "a failed allocation keeps its addresses": (
        "\tnoted(driver.cuMemAddressFree(made.address, size));\n\treturn error;",
        "\treturn error;",
    ),
    "a free keeps the addresses": (
        "error = noted(driver.cuMemAddressFree(gone.address, gone.size));",
        "error = SUCCESS;",
    ),
    "segments that are away are unmapped again": (
        "return segments[i].away ? SUCCESS : unmap(&segments[i]);",
        "return unmap(&segments[i]);",
    ),
    "a free unmaps what is away": ("else if (!found->away)\n", "else\n"),
    "a forked child takes the lock": ("return first && first != getpid();", "return false;"),
    "numbers come twice": ("made.number = ++last_number;", "made.number = count + 1;"),
    "exports are not refused": ("ours = find((uint64_t)where);", "ours = false;"),
    "a network card may register it": (
        ".location = {ON_DEVICE, device}};",
        ".location = {ON_DEVICE, device}, .flags.rdma = 1};",
    ),
    "another process may map it": (".type = PINNED, .location", ".type = PINNED, .handle_types = 1, .location"),
    "a resume forgets the peers": (
        "device == one->device || peers[one->device] >> device & 1",
        "device == one->device || (one->fresh ? 0 : peers[one->device] >> device & 1)",
    ),
    "a shortage counts as a failure": ("if (error && error != OUT_OF_MEMORY) {", "if (error) {"),
    "segments in the order of their making": ("\tplace = place_of(made->address);\n", "\tplace = count;\n"),
    "no context is made": ("return !RUNTIME(cudaFree, (void *), NULL);", "return false;"),
}
"""Old text, which occurs once, and new text, by what the change does."""


def changed(text: str, name: str) -> str:
    """Return the source with a change."""
    old, new = MUTANTS[name]
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
    return text.replace(old, new)
