/* The calls for the client (ctypes, sidecar/client/offload/addresses/preloaded.py); both list the same fields.
 *
 * All return 0 or a code of CUDA; none writes, exits or raises. The caller keeps the content: a segment is let go only
 * after it was copied, and comes back without content. */
#ifndef CADENZA_ADDRESSES_H
#define CADENZA_ADDRESSES_H

#include <stddef.h>
#include <stdint.h>

/* One cudaMalloc. The number is never used again, while an address may be, after its segment was freed. */
struct cadenza_segment {
	uint64_t address;
	uint64_t size;
	uint64_t number;
	int32_t device;
	int32_t away;
};

struct cadenza_counters {
	uint64_t segments;
	uint64_t live_bytes; /* of them on a GPU now */
	uint64_t away_bytes;
	uint64_t passed; /* cudaMalloc calls that went to the runtime; their memory stays at a yield */
	uint64_t passed_bytes;
	uint64_t exports_refused;
	uint64_t failures; /* calls of the driver that failed, shortage aside */
	int32_t last_failure;
	int32_t no_driver; /* the code with which libcuda could not be used, else 0 */
};

/* Fill in at most `most` segments in the order of their addresses; return how many there are. */
size_t cadenza_addresses_list(struct cadenza_segment *list, size_t most);

/* Let the memory of some segments go, by number; those that are away or freed by now are passed over. */
int cadenza_addresses_yield(const uint64_t *numbers, size_t count);

/* Give every segment that is away memory again: all of them, or after a failure none. */
int cadenza_addresses_resume(void);

void cadenza_addresses_count(struct cadenza_counters *counters);

#endif
