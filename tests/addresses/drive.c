/* Drives libcadenza-addresses.so over stand-ins for the driver and the runtime: `drive CHECK…` runs checks by name, all
 * without one; `drive fuzz SEED STEPS` compares random calls with a model. It ends with 1 and the line that failed.
 *
 * $SIMULATED_GPUS names two GPUs of tests/simulated, which it makes. The library is preloaded, or linked into it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../sidecar/agent/addresses/addresses.h"
#include "../simulated/gpu_file.h"

int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaIpcGetMemHandle(void *, void *);
int cudaDeviceEnablePeerAccess(int, unsigned);
extern long stub_runtime_mallocs, stub_runtime_frees, stub_runtime_others;

struct figures { int64_t live, reserved, synchronized, reachable, shareable; };
static struct {
    size_t (*list)(struct cadenza_segment *, size_t);
    int (*yield)(const uint64_t *, size_t);
    int (*resume)(void);
    void (*count)(struct cadenza_counters *);
    void (*figures)(struct figures *);
    void (*use_device)(int);
    void (*fail)(const char *, int, int);
    GpuFile *gpu, *second;
} call;

#define MIB ((size_t)1 << 20)
#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n", __func__, __LINE__, #condition); \
            _exit(1); \
        } \
    } while (0)

static struct figures figures(void)
{
    struct figures found = {0};
    call.figures(&found);
    return found;
}

static struct cadenza_counters counters(void)
{
    struct cadenza_counters found;
    call.count(&found);
    return found;
}

static int64_t on_gpu(void)
{
    gpu_lock(call.gpu);
    int64_t used = gpu_used(call.gpu);
    gpu_unlock(call.gpu);
    return used;
}

static unsigned char *get(size_t size)
{
    void *found = NULL;
    CHECK(cudaMalloc(&found, size) == 0);
    CHECK(found);
    return found;
}

static uint64_t number_of(const void *where)
{
    struct cadenza_segment list[256];
    size_t count = call.list(list, 256);
    CHECK(count <= 256);
    for (size_t i = 0; i < count; i++)
        if (list[i].address == (uint64_t)where)
            return list[i].number;
    return 0;
}

static int yield_all(void)
{
    struct cadenza_segment list[256];
    uint64_t numbers[256];
    size_t count = call.list(list, 256);
    for (size_t i = 0; i < count; i++)
        numbers[i] = list[i].number;
    return call.yield(numbers, count);
}

static void nothing_left(void)
{
    CHECK(call.list(NULL, 0) == 0);
    CHECK(figures().live == 0);
    CHECK(figures().reserved == 0);
    CHECK(figures().shareable == 0); /* no network card and no other process can map it */
    CHECK(on_gpu() == 0);
}

/* Return the signal that a use of an address ends a process with; 0 if it does not. */
static int use(volatile unsigned char *where)
{
    int status = 0;
    pid_t child = fork();
    if (!child) {
        signal(SIGSEGV, SIG_DFL); /* a sanitizer has its own */
        signal(SIGBUS, SIG_DFL);
        *where = 1;
        _exit(0);
    }
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void serves_what_torch_asks_for(void)
{
    static const size_t sizes[] = {2 * MIB, 20 * MIB, 6 * MIB, 2 * MIB};
    struct cadenza_segment list[4];
    unsigned char *found[4];
    long before = stub_runtime_mallocs;
    call.use_device(-1); /* the thread has no context yet */
    for (int i = 0; i < 4; i++)
        memset(found[i] = get(sizes[i]), i + 1, sizes[i]);
    CHECK(stub_runtime_mallocs == before);
    CHECK(call.list(list, 4) == 4);
    CHECK(call.list(list, 2) == 4);
    for (int i = 1; i < 4; i++)
        CHECK(list[i - 1].address + list[i - 1].size <= list[i].address);
    CHECK(counters().segments == 4 && counters().live_bytes == 30 * MIB && counters().away_bytes == 0);
    CHECK(figures().live == (int64_t)(30 * MIB) && on_gpu() == (int64_t)(30 * MIB));
    for (int i = 0; i < 4; i++)
        CHECK(found[i][0] == i + 1 && found[i][sizes[i] - 1] == i + 1);
    int64_t waits = figures().synchronized;
    for (int i = 0; i < 4; i++)
        CHECK(cudaFree(found[i]) == 0);
    CHECK(figures().synchronized == waits + 4); /* kernels may still use what is freed */
    nothing_left();
}

static void passes_the_rest_to_the_runtime(void)
{
    static const size_t sizes[] = {1, 512, MIB, 2 * MIB + 512, 3 * MIB};
    struct cadenza_counters before = counters();
    long mallocs = stub_runtime_mallocs, frees = stub_runtime_frees;
    for (int i = 0; i < 5; i++) {
        void *found = get(sizes[i]);
        CHECK(cudaFree(found) == 0);
    }
    CHECK(stub_runtime_mallocs == mallocs + 5 && stub_runtime_frees == frees + 5);
    CHECK(counters().passed == before.passed + 5);
    CHECK(counters().passed_bytes == before.passed_bytes + 6 * MIB + 2 * 512 + 1);
    CHECK(cudaFree(NULL) == 0);
    nothing_left();
}

static void comes_back_at_its_addresses(void)
{
    unsigned char *first = get(2 * MIB), *second = get(20 * MIB), *kept = get(4 * MIB);
    struct cadenza_segment list[3];
    uint64_t numbers[] = {number_of(first), number_of(second)};
    memset(kept, 7, 4 * MIB);
    CHECK(call.yield(numbers, 2) == 0);
    CHECK(figures().live == (int64_t)(4 * MIB) && on_gpu() == (int64_t)(4 * MIB));
    CHECK(counters().away_bytes == 22 * MIB && counters().live_bytes == 4 * MIB);
    CHECK(figures().reserved == (int64_t)(26 * MIB)); /* nobody else gets the addresses */
    CHECK(use(first) == SIGSEGV && use(second + 20 * MIB - 1) == SIGSEGV && use(kept) == 0);
    CHECK(call.yield(numbers, 2) == 0);
    CHECK(call.resume() == 0);
    CHECK(call.list(list, 3) == 3);
    for (int i = 0; i < 3; i++)
        CHECK(!list[i].away);
    memset(first, 3, 2 * MIB);
    memset(second, 4, 20 * MIB);
    CHECK(number_of(first) == numbers[0] && number_of(second) == numbers[1]);
    CHECK(first[2 * MIB - 1] == 3 && second[20 * MIB - 1] == 4 && kept[4 * MIB - 1] == 7);
    CHECK(call.resume() == 0);
    CHECK(figures().live == (int64_t)(26 * MIB));
    CHECK(cudaFree(first) == 0 && cudaFree(second) == 0 && cudaFree(kept) == 0);
    nothing_left();
}

static void a_resume_without_room_is_undone(void)
{
    enum { COUNT = 12 };
    unsigned char *found[COUNT];
    for (int i = 0; i < COUNT; i++)
        found[i] = get((2 + 2 * (size_t)(i % 3)) * MIB);
    CHECK(yield_all() == 0);
    for (int number = 1; number <= COUNT; number++) {
        call.gpu->fail_creation = number;
        CHECK(call.resume() == 2);
        CHECK(figures().live == 0 && on_gpu() == 0);
        CHECK(use(found[0]) == SIGSEGV);
    }
    CHECK(counters().failures == 0); /* a shortage is none */
    call.gpu->fail_creation = 0;
    CHECK(call.resume() == 0);
    for (int i = 0; i < COUNT; i++) {
        found[i][0] = 1;
        CHECK(cudaFree(found[i]) == 0);
    }
    nothing_left();
}

/* Whatever fails at whichever segment, also more than once, and also where the undoing fails: nothing is lost. */
static void a_resume_that_fails_anywhere_can_be_tried_again(void)
{
    static const char *const calls[] = {"cuMemCreate", "cuMemMap", "cuMemSetAccess"};
    enum { COUNT = 6 };
    unsigned char *found[COUNT];
    uint64_t failures = counters().failures;
    for (int i = 0; i < COUNT; i++)
        found[i] = get(2 * MIB);
    for (int i = 0; i < 3; i++)
        for (int number = 1; number <= COUNT; number++) {
            CHECK(yield_all() == 0);
            for (int times = 0; times < 3; times++) {
                call.fail(calls[i], number, 999);
                CHECK(call.resume() == 999);
                CHECK(figures().live == 0 && counters().away_bytes == COUNT * 2 * MIB);
            }
            CHECK(call.resume() == 0);
        }
    for (int number = 2; number <= COUNT; number++) {
        CHECK(yield_all() == 0);
        call.gpu->fail_creation = number;
        call.fail("cuMemUnmap", 1, 999); /* one segment stays, and is known to be there */
        CHECK(call.resume() == 2);
        CHECK(figures().live == (int64_t)(2 * MIB) && counters().live_bytes == 2 * MIB);
        call.gpu->fail_creation = 0;
        CHECK(call.resume() == 0);
        CHECK(figures().live == (int64_t)(COUNT * 2 * MIB));
    }
    CHECK(counters().failures == failures + 3 * COUNT * 3 + COUNT - 1);
    for (int i = 0; i < COUNT; i++) {
        found[i][2 * MIB - 1] = 1;
        CHECK(cudaFree(found[i]) == 0);
    }
    nothing_left();
}

static void a_driver_that_fails_leaves_nothing_behind(void)
{
    static const char *const calls[] = {"cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"};
    void *none = NULL;
    for (int i = 0; i < 4; i++) {
        uint64_t failures = counters().failures;
        call.fail(calls[i], 1, 999);
        CHECK(cudaMalloc(&none, 4 * MIB) == 999);
        CHECK(counters().failures == failures + 1 && counters().last_failure == 999);
        nothing_left();
    }
    unsigned char *first = get(2 * MIB), *second = get(2 * MIB);
    CHECK(yield_all() == 0);
    for (int i = 1; i < 4; i++)
        for (int number = 1; number <= 2; number++) {
            call.fail(calls[i], number, 999);
            CHECK(call.resume() == 999);
            CHECK(figures().live == 0);
        }
    CHECK(call.resume() == 0);
    call.fail("cuMemUnmap", 1, 999);
    uint64_t number = number_of(first);
    CHECK(call.yield(&number, 1) == 999);
    CHECK(use(first) == 0); /* it is where it was */
    call.fail("cuMemUnmap", 1, 999);
    CHECK(cudaFree(first) == 999);
    CHECK(number_of(first) == number);
    CHECK(cudaFree(first) == 0 && cudaFree(second) == 0);
    call.fail("cuMemCreate", 1, 801); /* a driver without virtual memory here: the runtime serves */
    long mallocs = stub_runtime_mallocs;
    CHECK(cudaFree(get(2 * MIB)) == 0);
    CHECK(stub_runtime_mallocs == mallocs + 1);
    nothing_left();
}

static void a_full_gpu_is_a_shortage(void)
{
    void *none = (void *)1;
    int64_t capacity = call.gpu->capacity;
    unsigned char *first = get(4 * MIB);
    call.gpu->capacity = (int64_t)(5 * MIB);
    CHECK(cudaMalloc(&none, 2 * MIB) == 2);
    CHECK(none == (void *)1);
    CHECK(figures().reserved == (int64_t)(4 * MIB) && figures().live == (int64_t)(4 * MIB));
    call.gpu->capacity = capacity;
    CHECK(cudaFree(first) == 0);
    nothing_left();
}

static void one_full_gpu_of_two_leaves_all_away(void)
{
    unsigned char *first = get(4 * MIB);
    int64_t capacity = call.second->capacity;
    call.use_device(1);
    unsigned char *second = get(2 * MIB), *third = get(2 * MIB);
    CHECK(yield_all() == 0);
    call.second->capacity = (int64_t)(3 * MIB);
    CHECK(call.resume() == 2);
    CHECK(figures().live == 0 && on_gpu() == 0 && counters().away_bytes == 8 * MIB);
    call.second->capacity = capacity;
    CHECK(call.resume() == 0 && on_gpu() == (int64_t)(4 * MIB));
    first[0] = second[0] = third[0] = 1;
    CHECK(cudaFree(second) == 0 && cudaFree(third) == 0);
    call.use_device(0);
    CHECK(cudaFree(first) == 0);
    nothing_left();
}

static void a_segment_freed_while_it_is_away_does_not_come_back(void)
{
    unsigned char *first = get(2 * MIB), *second = get(4 * MIB);
    uint64_t number = number_of(first);
    CHECK(yield_all() == 0);
    CHECK(cudaFree(first) == 0);
    CHECK(figures().reserved == (int64_t)(4 * MIB));
    unsigned char *third = get(2 * MIB);
    CHECK(number_of(third) > number);
    CHECK(call.yield(&number, 1) == 0); /* it is gone, and the new one stays */
    CHECK(call.resume() == 0);
    CHECK(figures().live == (int64_t)(6 * MIB));
    CHECK(cudaFree(second) == 0 && cudaFree(third) == 0);
    nothing_left();
}

static void exports_are_refused(void)
{
    char export[64];
    long others = stub_runtime_others;
    unsigned char *served = get(2 * MIB), *passed = get(512);
    uint64_t before = counters().exports_refused;
    CHECK(cudaIpcGetMemHandle(export, served) == 801 && cudaIpcGetMemHandle(export, served + 2 * MIB - 1) == 801);
    CHECK(stub_runtime_others == others && counters().exports_refused == before + 2);
    CHECK(cudaIpcGetMemHandle(export, passed) == 0 && stub_runtime_others == others + 1);
    CHECK(cudaFree(served) == 0 && cudaFree(passed) == 0);
    nothing_left();
}

static void peers_keep_their_access(void)
{
    unsigned char *before = get(2 * MIB);
    CHECK(figures().reachable == 1);
    call.use_device(1);
    CHECK(cudaDeviceEnablePeerAccess(0, 0) == 0);
    CHECK(figures().reachable == 2); /* the memory that was there */
    call.use_device(0);
    unsigned char *after = get(2 * MIB);
    CHECK(figures().reachable == 2);
    CHECK(yield_all() == 0 && call.resume() == 0);
    CHECK(figures().reachable == 2);
    call.use_device(1);
    unsigned char *there = get(2 * MIB);
    CHECK(figures().reachable == 1);
    struct cadenza_segment list[3];
    CHECK(call.list(list, 3) == 3);
    for (int i = 0; i < 3; i++)
        CHECK(list[i].device == (list[i].address == (uint64_t)there));
    call.use_device(0);
    CHECK(cudaDeviceEnablePeerAccess(-1, 0) == 1);
    CHECK(cudaFree(before) == 0 && cudaFree(after) == 0 && cudaFree(there) == 0);
    nothing_left();
}

static volatile bool ended;
static void *busy(void *seed)
{
    unsigned state = (unsigned)(uintptr_t)seed;
    call.use_device(0);
    for (int i = 0; i < 150; i++) {
        size_t size = (1 + (size_t)(rand_r(&state) % 4)) * 2 * MIB;
        unsigned char *found = get(size);
        CHECK(cudaFree(found) == 0);
    }
    return NULL;
}

static void *yielding(void *none)
{
    while (!ended) {
        CHECK(yield_all() == 0);
        CHECK(call.resume() == 0);
        counters();
    }
    return none;
}

static void threads_may_allocate_during_moves(void)
{
    pthread_t workers[3], mover;
    ended = false;
    pthread_create(&mover, NULL, yielding, NULL);
    for (uintptr_t i = 0; i < 3; i++)
        pthread_create(&workers[i], NULL, busy, (void *)(i + 1));
    for (int i = 0; i < 3; i++)
        pthread_join(workers[i], NULL);
    ended = true;
    pthread_join(mover, NULL);
    nothing_left();
}

/* A child that is forked while a thread of the parent holds the lock goes to the runtime, at once. */
static void a_forked_child_has_nothing(void)
{
    pthread_t worker;
    unsigned char *served = get(2 * MIB);
    uint64_t number = number_of(served);
    pthread_create(&worker, NULL, busy, (void *)9);
    for (int i = 0; i < 30; i++) {
        int status = 0;
        pid_t child = fork();
        if (!child) {
            void *found;
            long mallocs = stub_runtime_mallocs;
            alarm(5);
            CHECK(call.list(NULL, 0) == 0 && call.yield(&number, 1) == 1 && call.resume() == 1);
            CHECK(counters().segments == 0);
            CHECK(cudaMalloc(&found, 2 * MIB) == 0 && stub_runtime_mallocs == mallocs + 1);
            CHECK(cudaFree(found) == 0);
            _exit(0);
        }
        waitpid(child, &status, 0);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    pthread_join(worker, NULL);
    CHECK(use(served) == 0);
    CHECK(cudaFree(served) == 0);
    nothing_left();
}

/* --- random calls against a model ------------------------------------------------------------------------------- */

enum { MOST = 24 };
struct model { unsigned char *where; size_t size; uint64_t number; bool away; unsigned char content; };

static void fuzz(unsigned seed, int steps)
{
    struct model model[MOST] = {{0}};
    int used = 0;
    unsigned char next = 1;
    for (int step = 0; step < steps; step++) {
        int what = rand_r(&seed) % 10, one = used ? rand_r(&seed) % used : 0;
        if (what < 4 && used < MOST) {
            size_t size = (1 + (size_t)(rand_r(&seed) % 3)) * 2 * MIB;
            struct model *made = &model[used++];
            *made = (struct model){get(size), size, 0, false, next++};
            made->number = number_of(made->where);
            memset(made->where, made->content, 64);
            made->where[size - 1] = made->content;
        } else if (what < 6 && used) {
            CHECK(cudaFree(model[one].where) == 0);
            model[one] = model[--used];
        } else if (what < 8) {
            uint64_t numbers[MOST];
            size_t count = 0;
            for (int i = 0; i < used; i++)
                if (rand_r(&seed) % 2) {
                    numbers[count++] = model[i].number;
                    model[i].away = true;
                }
            CHECK(call.yield(numbers, count) == 0);
        } else {
            int away = 0;
            for (int i = 0; i < used; i++)
                away += model[i].away;
            if (away && rand_r(&seed) % 3 == 0) {
                call.gpu->fail_creation = 1 + rand_r(&seed) % away;
                CHECK(call.resume() == 2);
                call.gpu->fail_creation = 0;
            } else {
                CHECK(call.resume() == 0);
                for (int i = 0; i < used; i++)
                    if (model[i].away) {
                        memset(model[i].where, model[i].content, 64);
                        model[i].where[model[i].size - 1] = model[i].content;
                        model[i].away = false;
                    }
            }
        }
        struct cadenza_segment list[MOST];
        uint64_t live = 0, away = 0;
        CHECK(call.list(list, MOST) == (size_t)used);
        for (int i = 0; i < used; i++) {
            const struct model *of = NULL;
            for (int k = 0; k < used; k++)
                if (model[k].number == list[i].number)
                    of = &model[k];
            CHECK(of && list[i].address == (uint64_t)of->where && list[i].size == of->size);
            CHECK(list[i].away == of->away);
            *(of->away ? &away : &live) += of->size;
            if (!of->away)
                CHECK(of->where[0] == of->content && of->where[63] == of->content &&
                      of->where[of->size - 1] == of->content);
        }
        CHECK(counters().live_bytes == live && counters().away_bytes == away);
        CHECK(figures().live == (int64_t)live && on_gpu() == (int64_t)live);
        CHECK(figures().reserved == (int64_t)(live + away));
    }
    while (used)
        CHECK(cudaFree(model[--used].where) == 0);
    nothing_left();
}

static const struct { const char *name; void (*run)(void); } checks[] = {
#define CHECKED(name) {#name, name}
    CHECKED(serves_what_torch_asks_for),
    CHECKED(passes_the_rest_to_the_runtime),
    CHECKED(comes_back_at_its_addresses),
    CHECKED(a_resume_without_room_is_undone),
    CHECKED(a_resume_that_fails_anywhere_can_be_tried_again),
    CHECKED(a_driver_that_fails_leaves_nothing_behind),
    CHECKED(a_full_gpu_is_a_shortage),
    CHECKED(one_full_gpu_of_two_leaves_all_away),
    CHECKED(a_segment_freed_while_it_is_away_does_not_come_back),
    CHECKED(exports_are_refused),
    CHECKED(peers_keep_their_access),
    CHECKED(threads_may_allocate_during_moves),
    CHECKED(a_forked_child_has_nothing),
};

/* Without a driver the runtime serves everything. */
static void without_a_driver(void)
{
    void *found = NULL;
    CHECK(cudaMalloc(&found, 2 * MIB) == 0 && stub_runtime_mallocs == 1 && cudaFree(found) == 0);
    CHECK(counters().no_driver == 35 && call.list(NULL, 0) == 0 && call.resume() == 0);
}

int main(int argc, char **argv)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    const char *paths = getenv("SIMULATED_GPUS");
#define LOOK_UP(member, library, name) *(void **)&call.member = dlsym(library, name)
    LOOK_UP(list, RTLD_DEFAULT, "cadenza_addresses_list");
    LOOK_UP(yield, RTLD_DEFAULT, "cadenza_addresses_yield");
    LOOK_UP(resume, RTLD_DEFAULT, "cadenza_addresses_resume");
    LOOK_UP(count, RTLD_DEFAULT, "cadenza_addresses_count");
    CHECK(call.list && call.yield && call.resume && call.count);
    if (argc > 1 && !strcmp(argv[1], "without_a_driver"))
        return without_a_driver(), 0;
    CHECK(driver && paths);
    LOOK_UP(figures, driver, "stub_figures");
    LOOK_UP(use_device, driver, "stub_use_device");
    LOOK_UP(fail, driver, "stub_fail");
    for (int i = 0; i < 2; i++, paths += strcspn(paths, ":") + 1) {
        char path[512];
        snprintf(path, sizeof path, "%.*s", (int)strcspn(paths, ":"), paths);
        GpuFile *gpu = gpu_create(path) ? NULL : gpu_open(path);
        CHECK(gpu);
        gpu->capacity = (int64_t)(1024 * MIB);
        *(i ? &call.second : &call.gpu) = gpu;
    }
    if (argc == 4 && !strcmp(argv[1], "fuzz")) {
        fuzz((unsigned)atoi(argv[2]), atoi(argv[3]));
        return 0;
    }
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        bool wanted = argc < 2;
        for (int word = 1; word < argc; word++)
            wanted |= !strcmp(argv[word], checks[i].name);
        if (wanted)
            checks[i].run();
    }
    return 0;
}
