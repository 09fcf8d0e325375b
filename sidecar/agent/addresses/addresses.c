/*
 * Device memory at addresses that stay. Preloaded, this serves the cudaMalloc and cudaFree of PyTorch by the driver's
 * virtual memory (CUDA Driver API, Virtual Memory Management): an address range is reserved once, and the memory behind it
 * can go and come back. PyTorch's caching allocator stays on top and notices nothing.
 *
 * It links against libc alone: the driver and the runtime are looked up at the first use, so that programs without a GPU
 * start as before. Every error is a return code. A process that was forked off never takes the lock, which another thread
 * of its parent may have held; it cannot use the parent's GPU memory anyway, and its calls go to the runtime.
 */
#define _GNU_SOURCE
#include "addresses.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A container may have an older libc than the host on which this was built. */
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5\n.symver dlsym,dlsym@GLIBC_2.2.5");
#elif defined(__aarch64__) && !defined(__SANITIZE_ADDRESS__)
__asm__(".symver dlopen,dlopen@GLIBC_2.17\n.symver dlsym,dlsym@GLIBC_2.17");
#endif

#define EXPORTED __attribute__((visibility("default")))
/* PyTorch's allocator asks for multiples of this; other callers' smaller blocks would take as much each. */
#define MULTIPLE ((size_t)2 << 20)
#define MAX_DEVICES 64

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NOT_SUPPORTED = 801, NO_DRIVER = 35 };
enum { PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3, MINIMUM = 0 };

/* CUmemLocation, CUmemAllocationProp and CUmemAccessDesc of cuda.h. */
struct location { int type, id; };
struct properties {
	int type, handle_types;
	struct location location;
	void *security;
	struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
};
struct access { struct location location; int flags; };
typedef unsigned long long handle;

#define DRIVER_CALLS(X) \
	X(cuMemAddressReserve, uint64_t *, size_t, size_t, uint64_t, unsigned long long) \
	X(cuMemAddressFree, uint64_t, size_t) \
	X(cuMemCreate, handle *, size_t, const struct properties *, unsigned long long) \
	X(cuMemRelease, handle) \
	X(cuMemMap, uint64_t, size_t, size_t, handle, unsigned long long) \
	X(cuMemUnmap, uint64_t, size_t) \
	X(cuMemSetAccess, uint64_t, size_t, const struct access *, size_t) \
	X(cuMemGetAllocationGranularity, size_t *, const struct properties *, int) \
	X(cuCtxGetCurrent, void **) \
	X(cuCtxGetDevice, int *) \
	X(cuCtxPushCurrent_v2, void *) \
	X(cuCtxPopCurrent_v2, void **) \
	X(cuCtxSynchronize, void)

static struct {
#define X(name, ...) int (*name)(__VA_ARGS__);
	DRIVER_CALLS(X)
#undef X
} driver;

struct segment {
	uint64_t address;
	size_t size;
	uint64_t number;
	handle handle;
	void *context;
	int device;
	bool away;
	bool fresh; /* came back in the resume that is under way */
};

/* All below is under the lock, apart from `owner`. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t owner; /* the process that uses the driver; 0: none yet */
static bool loaded;
static struct segment *segments; /* by address */
static size_t count, room;
static uint64_t last_number;
static uint64_t peers[MAX_DEVICES]; /* the devices that may use the memory of each, as bits */
static struct cadenza_counters counters;

static bool forked(void)
{
	pid_t first = __atomic_load_n(&owner, __ATOMIC_ACQUIRE);

	return first && first != getpid();
}

static void own(void)
{
	pid_t none = 0;

	__atomic_compare_exchange_n(&owner, &none, getpid(), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* --- the runtime and the driver -------------------------------------------------------------------------------- */

static int note_runtime(struct dl_phdr_info *object, size_t size, void *path)
{
	const char *name = object->dlpi_name ? strrchr(object->dlpi_name, '/') : NULL;

	(void)size;
	if (!name || strncmp(name, "/libcudart", strlen("/libcudart")))
		return 0;
	*(const char **)path = object->dlpi_name;
	return 1;
}

/* Return the runtime's own function; it may be loaded where RTLD_NEXT does not look. */
static void *runtime(const char *name)
{
	void *found = dlsym(RTLD_NEXT, name), *library;
	const char *path = NULL;

	if (found || !dl_iterate_phdr(note_runtime, &path) || !path)
		return found;
	/* Only the copy that is there: another one would be a runtime that PyTorch does not use. */
	library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
	return library ? dlsym(library, name) : NULL;
}

#define RUNTIME(name, parameters, ...) \
	(__extension__({ \
		int (*call) parameters = (int (*) parameters)runtime(#name); \
		call ? call(__VA_ARGS__) : NOT_INITIALIZED; \
	}))

/* Look the driver up once; return whether it has all the calls. */
static bool load(void)
{
	void *library;

	if (loaded || counters.no_driver)
		return loaded;
	library = dlopen("libcuda.so.1", RTLD_NOW);
	counters.no_driver = library ? SUCCESS : NO_DRIVER;
#define X(name, ...) \
	if (library && !(driver.name = (int (*)(__VA_ARGS__))dlsym(library, #name))) \
		counters.no_driver = NOT_SUPPORTED;
	DRIVER_CALLS(X)
#undef X
	loaded = !counters.no_driver;
	return loaded;
}

/* Count a call of the driver that failed; a shortage is not one. */
static int noted(int error)
{
	if (error && error != OUT_OF_MEMORY) {
		counters.failures++;
		counters.last_failure = error;
	}
	return error;
}

/* --- segments -------------------------------------------------------------------------------------------------- */

static size_t place_of(uint64_t address)
{
	size_t low = 0, high = count;

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (segments[middle].address + segments[middle].size > address)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

/* Return the segment in which an address lies. */
static struct segment *find(uint64_t address)
{
	size_t place = place_of(address);

	return place < count && segments[place].address <= address ? &segments[place] : NULL;
}

static bool add(const struct segment *made)
{
	size_t place;

	if (count == room) {
		size_t wanted = room ? 2 * room : 1024;
		struct segment *larger = realloc(segments, wanted * sizeof(*segments));

		if (!larger)
			return false;
		segments = larger;
		room = wanted;
	}
	place = place_of(made->address);
	memmove(segments + place + 1, segments + place, (count - place) * sizeof(*segments));
	segments[place] = *made;
	count++;
	return true;
}

static void drop(struct segment *gone)
{
	size_t after = (size_t)(segments + count - (gone + 1));

	memmove(gone, gone + 1, after * sizeof(*segments));
	count--;
}

/* Memory that no other process may map and no network card may register: such a registration would go stale at a yield,
 * and fails at once instead. */
static struct properties properties_on(int device)
{
	return (struct properties){.type = PINNED, .location = {ON_DEVICE, device}};
}

static int let_use(const struct segment *one)
{
	struct access access[MAX_DEVICES];
	size_t number = 0;

	for (int device = 0; device < MAX_DEVICES; device++)
		if (device == one->device || peers[one->device] >> device & 1)
			access[number++] = (struct access){{ON_DEVICE, device}, READ_WRITE};
	/* No device can use a new mapping before this call. */
	return noted(driver.cuMemSetAccess(one->address, one->size, access, number));
}

static int map(struct segment *one)
{
	struct properties properties = properties_on(one->device);
	int error = noted(driver.cuMemCreate(&one->handle, one->size, &properties, 0));

	if (error)
		return error;
	error = noted(driver.cuMemMap(one->address, one->size, 0, one->handle, 0));
	if (!error) {
		error = let_use(one);
		if (!error) {
			one->away = false;
			return SUCCESS;
		}
		noted(driver.cuMemUnmap(one->address, one->size));
	}
	noted(driver.cuMemRelease(one->handle));
	return error;
}

static int unmap(struct segment *one)
{
	int error = noted(driver.cuMemUnmap(one->address, one->size));

	if (error)
		return error;
	/* The driver frees the memory once neither a mapping nor the handle is left. */
	one->away = true;
	return noted(driver.cuMemRelease(one->handle));
}

/* Make a segment; NOT_SUPPORTED means that the runtime must serve the call. */
static int make(size_t size, uint64_t *address)
{
	struct segment made = {.size = size};
	struct properties properties;
	size_t granularity = 0;
	int error;

	if (!load() || driver.cuCtxGetCurrent(&made.context) || !made.context || driver.cuCtxGetDevice(&made.device) ||
	    made.device < 0 || made.device >= MAX_DEVICES)
		return NOT_SUPPORTED;
	properties = properties_on(made.device);
	if (noted(driver.cuMemGetAllocationGranularity(&granularity, &properties, MINIMUM)) || !granularity ||
	    size % granularity)
		return NOT_SUPPORTED;
	/* A reservation takes addresses and no memory: it stays through all yields. */
	error = noted(driver.cuMemAddressReserve(&made.address, size, granularity, 0, 0));
	if (error)
		return error;
	error = map(&made);
	if (!error) {
		made.number = ++last_number;
		*address = made.address;
		if (add(&made))
			return SUCCESS;
		error = OUT_OF_MEMORY;
		unmap(&made);
	}
	noted(driver.cuMemAddressFree(made.address, size));
	return error;
}

/* Return whether the calling thread has a context, after the runtime has made one if need be. */
static bool context_ready(void)
{
	void *context = NULL;
	bool found;

	pthread_mutex_lock(&lock);
	found = load();
	pthread_mutex_unlock(&lock);
	if (!found || (!driver.cuCtxGetCurrent(&context) && context))
		return found;
	return !RUNTIME(cudaFree, (void *), NULL); /* as every call of the runtime, this one makes the context */
}

/* --- the runtime's calls --------------------------------------------------------------------------------------- */

EXPORTED int cudaMalloc(void **where, size_t size)
{
	int error = NOT_SUPPORTED;
	uint64_t address = 0;

	if (forked())
		return RUNTIME(cudaMalloc, (void **, size_t), where, size);
	own();
	if (where && size && size % MULTIPLE == 0 && context_ready()) {
		pthread_mutex_lock(&lock);
		error = make(size, &address);
		pthread_mutex_unlock(&lock);
	}
	if (!error)
		*where = (void *)address;
	if (error != NOT_SUPPORTED)
		return error;
	error = RUNTIME(cudaMalloc, (void **, size_t), where, size);
	if (!error) {
		pthread_mutex_lock(&lock);
		counters.passed++;
		counters.passed_bytes += size;
		pthread_mutex_unlock(&lock);
	}
	return error;
}

/* Wait for the device, as the runtime's cudaFree does: PyTorch frees memory that work in its streams still uses. */
static int drain(void *context)
{
	int error = driver.cuCtxPushCurrent_v2(context);

	if (error)
		return error;
	error = driver.cuCtxSynchronize();
	driver.cuCtxPopCurrent_v2(&context);
	return error;
}

EXPORTED int cudaFree(void *where)
{
	struct segment *found, gone = {0};
	int error = SUCCESS;

	if (!where || forked())
		return RUNTIME(cudaFree, (void *), where);
	pthread_mutex_lock(&lock);
	found = find((uint64_t)where);
	if (found && found->address == (uint64_t)where)
		gone = *found;
	pthread_mutex_unlock(&lock);
	if (!gone.number)
		return RUNTIME(cudaFree, (void *), where);
	/* Outside the lock: the streams may work for long, and other threads go on allocating. */
	error = drain(gone.context);
	if (error)
		return error;
	pthread_mutex_lock(&lock);
	found = find((uint64_t)where); /* another thread may have yielded or freed it */
	if (!found || found->number != gone.number)
		error = INVALID_VALUE;
	else if (!found->away)
		error = unmap(found);
	if (found && !error) {
		drop(found);
		error = noted(driver.cuMemAddressFree(gone.address, gone.size));
	}
	pthread_mutex_unlock(&lock);
	return error;
}

/* CUDA's IPC takes no virtual memory, and another process's mapping would outlive a yield. */
EXPORTED int cudaIpcGetMemHandle(void *export, void *where)
{
	bool ours = false;

	if (!forked()) {
		pthread_mutex_lock(&lock);
		ours = find((uint64_t)where);
		counters.exports_refused += ours;
		pthread_mutex_unlock(&lock);
	}
	return ours ? NOT_SUPPORTED : RUNTIME(cudaIpcGetMemHandle, (void *, void *), export, where);
}

/* The runtime lets a peer use what cudaMalloc made; for virtual memory this is said for each range. */
EXPORTED int cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
	int error = RUNTIME(cudaDeviceEnablePeerAccess, (int, unsigned), peer, flags), device = -1;

	if (error || forked() || peer < 0 || peer >= MAX_DEVICES || !context_ready())
		return error;
	pthread_mutex_lock(&lock);
	if (!driver.cuCtxGetDevice(&device) && device >= 0 && device < MAX_DEVICES) {
		peers[peer] |= (uint64_t)1 << device;
		for (size_t i = 0; i < count && !error; i++)
			if (segments[i].device == peer && !segments[i].away)
				error = let_use(&segments[i]);
	}
	pthread_mutex_unlock(&lock);
	return error;
}

/* --- for the client -------------------------------------------------------------------------------------------- */

EXPORTED size_t cadenza_addresses_list(struct cadenza_segment *list, size_t most)
{
	size_t found;

	if (forked())
		return 0;
	pthread_mutex_lock(&lock);
	found = count;
	for (size_t i = 0; i < count && i < most; i++)
		list[i] = (struct cadenza_segment){segments[i].address, segments[i].size, segments[i].number,
						   segments[i].device, segments[i].away};
	pthread_mutex_unlock(&lock);
	return found;
}

static int let_go(uint64_t number)
{
	for (size_t i = 0; i < count; i++)
		if (segments[i].number == number)
			return segments[i].away ? SUCCESS : unmap(&segments[i]);
	return SUCCESS;
}

EXPORTED int cadenza_addresses_yield(const uint64_t *numbers, size_t number)
{
	int error = SUCCESS;

	if (forked())
		return INVALID_VALUE;
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < number && !error; i++)
		error = let_go(numbers[i]);
	pthread_mutex_unlock(&lock);
	return error;
}

EXPORTED int cadenza_addresses_resume(void)
{
	int error = SUCCESS;

	if (forked())
		return INVALID_VALUE;
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < count && !error; i++) {
		segments[i].fresh = segments[i].away;
		if (segments[i].away)
			error = map(&segments[i]);
	}
	for (size_t i = 0; i < count; i++) {
		/* All or none: with a part of its memory the job cannot go on, and others lack the room. */
		if (error && segments[i].fresh && !segments[i].away)
			unmap(&segments[i]);
		segments[i].fresh = false;
	}
	pthread_mutex_unlock(&lock);
	return error;
}

EXPORTED void cadenza_addresses_count(struct cadenza_counters *filled)
{
	if (forked()) {
		*filled = (struct cadenza_counters){0};
		return;
	}
	pthread_mutex_lock(&lock);
	*filled = counters;
	filled->segments = count;
	filled->live_bytes = filled->away_bytes = 0;
	for (size_t i = 0; i < count; i++)
		*(segments[i].away ? &filled->away_bytes : &filled->live_bytes) += segments[i].size;
	pthread_mutex_unlock(&lock);
}
