/* A libcuda.so.1 and libnvidia-ml.so.1 for tests: a process "uses a GPU" when $CUDA_STUB/gpu/PID says how many MB it
 * has, and its checkpoint state is the word in $CUDA_STUB/state/PID. A file $CUDA_STUB/fail/OPERATION.PID makes that
 * call fail with the number in it; -1 makes it hang for as long as the file is there, and $CUDA_STUB/hanging names it
 * then. Total memory is $CUDA_STUB/total in MB. Each call is a line in $CUDA_STUB/log.
 *
 * A process that allocates memory here has it on the GPU, too: its content is kept in the process. With the file spoil
 * it is read back changed, and with the file kept NVML shows checkpointed processes as well.
 *
 * The files mig, mps, compute (mode), persistence and driver (version) say what NVML tells of the machine.
 *
 * With $SIMULATED_GPUS the GPUs are those of tests/simulated instead: NVML's processes and bytes are those of their
 * files, and a checkpoint takes a process's bytes off them.
 *
 * Virtual memory has real contents: the memory behind an address is a part of a file in memory, mapped there. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../simulated/gpu_file.h"

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, OPERATING_SYSTEM = 304, ILLEGAL_STATE = 401, NOT_FOUND = 500,
       NOT_SUPPORTED = 801 };
enum { RUNNING, LOCKED, CHECKPOINTED, FAILED };
static const char *const NAMES[] = {"running", "locked", "checkpointed", "failed"};

static void path_of(char *path, size_t size, const char *what)
{
    const char *root = getenv("CUDA_STUB");
    snprintf(path, size, "%s/%s", root ? root : "/nowhere", what);
}

static int read_text(const char *what, char *text, size_t size)
{
    char path[512];
    path_of(path, sizeof path, what);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return 0;
    ssize_t count = read(file, text, size - 1);
    close(file);
    text[count < 0 ? 0 : count] = 0;
    return count > 0;
}

static long long read_number(const char *what, long long otherwise)
{
    char text[64];
    return read_text(what, text, sizeof text) ? atoll(text) : otherwise;
}

static void write_text(const char *what, const char *text)
{
    char path[512], temporary[520];
    path_of(path, sizeof path, what);
    snprintf(temporary, sizeof temporary, "%s.new", path);
    FILE *file = fopen(temporary, "we");
    if (!file)
        abort();
    fputs(text, file);
    fclose(file);
    rename(temporary, path);
}

static void note(const char *operation, int pid, int result)
{
    char path[512], line[128];
    path_of(path, sizeof path, "log");
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    int count = snprintf(line, sizeof line, "%s %d %d\n", operation, pid, result);
    if (file >= 0 && write(file, line, count) != count)
        abort();
    close(file);
}

static int injected(const char *operation, int pid)
{
    char what[64];
    snprintf(what, sizeof what, "fail/%s.%d", operation, pid);
    int result = (int)read_number(what, OK);
    if (result == -1)
        write_text("hanging", what);
    while (result == -1) {
        usleep(5000);
        result = (int)read_number(what, OK);
    }
    return result;
}

static GpuFile *simulated(unsigned index)
{
    static GpuFile *files[8];
    static int count = -1;
    const char *paths = getenv("SIMULATED_GPUS");
    if (count < 0)
        for (count = 0; paths && *paths && count < 8; paths += strcspn(paths, ":"), paths += *paths == ':') {
            char path[512];
            snprintf(path, sizeof path, "%.*s", (int)strcspn(paths, ":"), paths);
            if (!(files[count++] = gpu_open(path)))
                abort();
        }
    return index < (unsigned)count ? files[index] : NULL;
}

/* Move a process on the simulated GPUs from one state to another; a failed restore is for good. */
static int move_simulated(int pid, int before, int after)
{
    int result = INVALID_VALUE;
    GpuFile *gpu;
    for (unsigned index = 0; (gpu = simulated(index)); index++) {
        gpu_lock(gpu);
        int64_t used = gpu_used(gpu);
        GpuOwner *owner = gpu_owner(gpu, pid, 0);
        if (owner && owner->state != before) {
            result = ILLEGAL_STATE;
        } else if (owner && before == CHECKPOINTED && used + owner->saved > gpu->capacity) {
            owner->state = FAILED;
            result = OUT_OF_MEMORY;
        } else if (owner) {
            if (after == CHECKPOINTED)
                owner->saved = owner->bytes, owner->bytes = 0;
            else if (before == CHECKPOINTED)
                owner->bytes = owner->saved, owner->saved = 0;
            __atomic_store_n(&owner->state, after, __ATOMIC_RELEASE);
            result = OK;
        }
        gpu_unlock(gpu);
        const int64_t *memory = owner ? &owner->memory : NULL;
        const int64_t wanted = after == CHECKPOINTED ? MEMORY_AWAY : MEMORY_PRESENT;
        for (int tries = 0; result == OK && memory && gpu_word(memory) != MEMORY_UNKNOWN && gpu_word(memory) != wanted;) {
            usleep(1000);
            if (++tries == 10000)
                result = OPERATING_SYSTEM;
        }
    }
    return result;
}

static int state_of(int pid)
{
    GpuFile *gpu;
    for (unsigned index = 0; (gpu = simulated(index)); index++) {
        GpuOwner *owner = gpu_owner(gpu, pid, 0);
        if (owner)
            return (int)owner->state;
    }
    char what[64], text[64];
    snprintf(what, sizeof what, "state/%d", pid);
    if (!read_text(what, text, sizeof text))
        return RUNNING;
    for (int state = RUNNING; state <= FAILED; state++)
        if (strcmp(text, NAMES[state]) == 0)
            return state;
    return FAILED;
}

static long long megabytes_of(int pid)
{
    char what[64];
    snprintf(what, sizeof what, "gpu/%d", pid);
    return read_number(what, -1);
}

static int move(const char *operation, int pid, int before, int after)
{
    char what[64];
    int result = injected(operation, pid);
    if (simulated(0))
        return result == OK ? move_simulated(pid, before, after) : result;
    if (result == OK && megabytes_of(pid) < 0)
        result = INVALID_VALUE;
    if (result == OK && state_of(pid) != before)
        result = ILLEGAL_STATE;
    snprintf(what, sizeof what, "state/%d", pid);
    if (result == OK)
        write_text(what, NAMES[after]);
    note(operation, pid, result);
    return result;
}

/* --- libcuda ---------------------------------------------------------------------------------------------------- */

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : (int)read_number("fail/init", OK); }

int cuDriverGetVersion(int *version)
{
    *version = (int)read_number("version", 13000);
    return OK;
}

int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return (void)device, *context = context, OK; }
int cuCtxSetCurrent(void *context) { return context ? OK : INVALID_VALUE; }
int cuMemHostAlloc(void **place, size_t size, unsigned flags) { return (void)flags, (*place = malloc(size)) ? OK : OUT_OF_MEMORY; }
int cuMemAllocManaged(uint64_t *place, size_t size, unsigned flags) { return (void)place, (void)size, (void)flags, NOT_SUPPORTED; }

int cuMemAlloc(uint64_t *place, size_t size)
{
    static size_t taken;
    char what[64], megabytes[32];
    taken += size;
    snprintf(what, sizeof what, "gpu/%d", getpid());
    snprintf(megabytes, sizeof megabytes, "%zu", taken >> 20);
    write_text(what, megabytes);
    return (*place = (uint64_t)malloc(size)) ? OK : OUT_OF_MEMORY;
}

int cuMemcpyHtoD(uint64_t place, const void *host, size_t size) { return memcpy((void *)place, host, size), OK; }
int cuMemcpyDtoH(void *host, uint64_t place, size_t size)
{
    memcpy(host, (void *)place, size);
    *(char *)host ^= (char)read_number("spoil", 0);
    return OK;
}

int cuCheckpointProcessGetState(int pid, int *state)
{
    int result = injected("state", pid);
    if (result == OK && !simulated(0) && megabytes_of(pid) < 0)
        result = INVALID_VALUE;
    *state = state_of(pid);
    return result;
}

int cuCheckpointProcessLock(int pid, void *args)
{
    if (*(unsigned *)args == 0) /* timeoutMs: the agent never waits for ever */
        return INVALID_VALUE;
    return move("lock", pid, RUNNING, LOCKED);
}

int cuCheckpointProcessCheckpoint(int pid, void *args)
{
    return args ? INVALID_VALUE : move("checkpoint", pid, LOCKED, CHECKPOINTED);
}

int cuCheckpointProcessRestore(int pid, void *args)
{
    if (args) { /* {pairs, count}: write the first pair down */
        unsigned char *pair = *(unsigned char **)args;
        unsigned count = *(unsigned *)((char *)args + sizeof(void *));
        char text[80] = "", *end = text;
        for (int byte = 0; count && byte < 32; byte++)
            end += sprintf(end, "%02x", pair[byte]);
        write_text("pair", text);
    }
    return move("restore", pid, CHECKPOINTED, LOCKED);
}

int cuCheckpointProcessUnlock(int pid, void *args) { return args ? INVALID_VALUE : move("unlock", pid, LOCKED, RUNNING); }

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    (void)version, (void)flags;
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) {
        Dl_info self;
        dladdr((void *)cuInit, &self);
        void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
        *function = library ? dlsym(library, name) : NULL;
    }
    if (status)
        *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

/* --- libcuda: virtual memory ------------------------------------------------------------------------------------ */

enum { GRANULARITY = 2 << 20, MOST_RANGES = 1 << 14, MOST_DEVICES = 8 };
struct vmm_properties { int type, handle_types, where, device; void *security; unsigned char compression, rdma; };
struct vmm_access { int where, device, flags; };
struct physical { size_t size, offset; int device, released, mapped; };
struct range { char *start; size_t size; struct physical *behind; int reserved; };

static pthread_mutex_t vmm_lock = PTHREAD_MUTEX_INITIALIZER;
static struct range ranges[MOST_RANGES];
static size_t range_count, vmm_end;
static int vmm_file = -1;
static __thread int vmm_device;
static int contexts[MOST_DEVICES]; /* the address of each is a context */

/* For tests: what is not a call of the driver's. */
struct vmm_figures { int64_t live, reserved, synchronized, reachable, shareable; };
static struct vmm_figures vmm_figures;
void stub_use_device(int device) { vmm_device = device; } /* of the calling thread; -1: it has no context */
void stub_figures(struct vmm_figures *figures) { *figures = vmm_figures; }

static struct { const char *call; int number, code; } vmm_fault;
void stub_fail(const char *call, int number, int code) /* the n-th of these calls from now fails */
{
    vmm_fault.call = call, vmm_fault.number = number, vmm_fault.code = code;
}

static int faulty(const char *call)
{
    return vmm_fault.number && !strcmp(call, vmm_fault.call) && !--vmm_fault.number ? vmm_fault.code : OK;
}

static struct range *range_at(uint64_t start, size_t size)
{
    for (size_t index = 0; index < range_count; index++)
        if (ranges[index].reserved && ranges[index].start == (char *)start && ranges[index].size == size)
            return &ranges[index];
    return NULL;
}

/* Give memory back that is neither mapped nor held by a handle. */
static void end_physical(struct physical *memory)
{
    if (memory->mapped || !memory->released)
        return;
    GpuFile *gpu = simulated((unsigned)memory->device);
    fallocate(vmm_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)memory->offset, (off_t)memory->size);
    if (gpu)
        gpu_take(gpu, getpid(), -(int64_t)memory->size);
    vmm_figures.live -= (int64_t)memory->size;
    free(memory);
}

#define LOCKED(code) \
    (pthread_mutex_lock(&vmm_lock), result = faulty(__func__), result = result ? result : (code), \
     pthread_mutex_unlock(&vmm_lock), result)

int cuCtxGetCurrent(void **context) { return *context = vmm_device < 0 ? NULL : &contexts[vmm_device], OK; }
int cuCtxGetDevice(int *device) { return *device = vmm_device, OK; }
int cuCtxPushCurrent_v2(void *context) { return vmm_device = (int)((int *)context - contexts), OK; }
int cuCtxPopCurrent_v2(void **context) { return *context = &contexts[vmm_device], OK; }
int cuCtxSynchronize(void) { return __atomic_add_fetch(&vmm_figures.synchronized, 1, __ATOMIC_RELAXED), OK; }

int cuMemGetAllocationGranularity(size_t *granularity, const struct vmm_properties *properties, int option)
{
    return *granularity = GRANULARITY, option || properties->type != 1 ? INVALID_VALUE : OK;
}

static int reserve(uint64_t *start, size_t size)
{
    /* Never given back to the system: no address comes twice, and the use of a stale one is a signal. */
    char *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    size_t index = 0;
    while (index < range_count && ranges[index].reserved)
        index++;
    if (found == MAP_FAILED || !size || size % GRANULARITY || index == MOST_RANGES)
        return found == MAP_FAILED ? OUT_OF_MEMORY : INVALID_VALUE;
    range_count += index == range_count;
    ranges[index] = (struct range){found, size, NULL, 1};
    vmm_figures.reserved += (int64_t)size;
    return *start = (uint64_t)found, OK;
}

int cuMemAddressReserve(uint64_t *start, size_t size, size_t alignment, uint64_t wanted, unsigned long long flags)
{
    int result;
    return wanted || flags || alignment % GRANULARITY ? INVALID_VALUE : LOCKED(reserve(start, size));
}

static int free_address(uint64_t start, size_t size)
{
    struct range *range = range_at(start, size);
    if (!range || range->behind)
        return INVALID_VALUE;
    range->reserved = 0;
    vmm_figures.reserved -= (int64_t)size;
    return OK;
}

int cuMemAddressFree(uint64_t start, size_t size)
{
    int result;
    return LOCKED(free_address(start, size));
}

static int create(struct physical **made, size_t size, int device)
{
    GpuFile *gpu = simulated((unsigned)device);
    if (gpu && (gpu_fault(&gpu->fail_creation) || gpu_take(gpu, getpid(), (int64_t)size)))
        return OUT_OF_MEMORY;
    if (vmm_file < 0)
        vmm_file = memfd_create("gpu", MFD_CLOEXEC);
    struct physical *memory = malloc(sizeof *memory);
    *memory = (struct physical){size, vmm_end, device, 0, 0};
    vmm_end += size;
    vmm_figures.live += (int64_t)size;
    return *made = memory, ftruncate(vmm_file, (off_t)vmm_end) ? OPERATING_SYSTEM : OK;
}

int cuMemCreate(struct physical **made, size_t size, const struct vmm_properties *properties, unsigned long long flags)
{
    int result;
    if (flags || properties->type != 1 || properties->where != 1 || !size || size % GRANULARITY)
        return INVALID_VALUE;
    vmm_figures.shareable += properties->handle_types || properties->rdma;
    return LOCKED(create(made, size, properties->device));
}

static int release(struct physical *memory)
{
    if (memory->released)
        return INVALID_VALUE;
    memory->released = 1;
    end_physical(memory);
    return OK;
}

int cuMemRelease(struct physical *memory)
{
    int result;
    return LOCKED(release(memory));
}

static int map_range(uint64_t start, size_t size, struct physical *memory)
{
    struct range *range = range_at(start, size);
    if (!range || range->behind || memory->released || memory->size != size)
        return INVALID_VALUE;
    if (mmap(range->start, size, PROT_NONE, MAP_SHARED | MAP_FIXED, vmm_file, (off_t)memory->offset) == MAP_FAILED)
        return OPERATING_SYSTEM;
    memory->mapped = 1;
    range->behind = memory;
    return OK;
}

int cuMemMap(uint64_t start, size_t size, size_t offset, struct physical *memory, unsigned long long flags)
{
    int result;
    return offset || flags ? INVALID_VALUE : LOCKED(map_range(start, size, memory));
}

static int unmap_range(uint64_t start, size_t size)
{
    struct range *range = range_at(start, size);
    if (!range || !range->behind)
        return INVALID_VALUE;
    mmap(range->start, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    range->behind->mapped = 0;
    end_physical(range->behind);
    range->behind = NULL;
    return OK;
}

int cuMemUnmap(uint64_t start, size_t size)
{
    int result;
    return LOCKED(unmap_range(start, size));
}

static int let_use(uint64_t start, size_t size, const struct vmm_access *access, size_t count)
{
    struct range *range = range_at(start, size);
    int own = 0;
    if (!range || !range->behind)
        return INVALID_VALUE;
    for (size_t index = 0; index < count; index++)
        own |= access[index].device == range->behind->device && access[index].flags == 3;
    vmm_figures.reachable = (int64_t)count; /* devices that may use the memory of the last call */
    return own && mprotect(range->start, size, PROT_READ | PROT_WRITE) ? OPERATING_SYSTEM : OK;
}

int cuMemSetAccess(uint64_t start, size_t size, const struct vmm_access *access, size_t count)
{
    int result;
    return LOCKED(let_use(start, size, access, count));
}

/* --- libnvidia-ml ----------------------------------------------------------------------------------------------- */

enum { NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_INSUFFICIENT_SIZE = 7, NVML_GPU_IS_LOST = 15 };
enum { MOST = GPU_OWNERS };
struct utilization { unsigned gpu, memory; };
struct sample { unsigned pid; unsigned long long time_us; unsigned sm, memory, encoder, decoder; };
struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct process { unsigned pid; unsigned long long used; unsigned instance, compute; };

static unsigned simulated_processes(GpuFile *gpu, struct process *found)
{
    unsigned count = 0;
    gpu_lock(gpu);
    gpu_used(gpu); /* without the dead */
    for (GpuOwner *owner = gpu->owners; owner < gpu->owners + GPU_OWNERS; owner++)
        if (owner->pid && owner->state != CHECKPOINTED)
            found[count++] = (struct process){(unsigned)owner->pid, (unsigned long long)owner->bytes, ~0u, ~0u};
    gpu_unlock(gpu);
    return count;
}

static unsigned processes(void *device, struct process *found)
{
    char path[512];
    unsigned count = 0;
    GpuFile *gpu = simulated((unsigned)(uintptr_t)device - 1);
    if (gpu)
        return simulated_processes(gpu, found);
    path_of(path, sizeof path, "gpu");
    DIR *directory = opendir(path);
    for (struct dirent *entry; directory && (entry = readdir(directory)) && count < MOST;) {
        int pid = atoi(entry->d_name);
        if (pid <= 0 || strchr(entry->d_name, '.') || kill(pid, 0))
            continue;
        if (state_of(pid) != CHECKPOINTED || read_number("kept", 0))
            found[count++] = (struct process){pid, megabytes_of(pid) << 20, ~0u, ~0u};
    }
    if (directory)
        closedir(directory);
    return count;
}

int nvmlInitWithFlags(unsigned flags) { return (int)(flags & 0); }
const char *nvmlErrorString(int result) { return result == NVML_NOT_SUPPORTED ? "Not Supported" : "Unknown Error"; }
int nvmlDeviceGetCount_v2(unsigned *count)
{
    for (*count = 0; simulated(*count); ++*count) {
    }
    *count += *count == 0;
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return *device = (void *)(uintptr_t)(index + 1), OK; }
int nvmlDeviceGetMinorNumber(void *device, unsigned *minor) { return *minor = (uintptr_t)device - 1, OK; }
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *later)
{
    (void)device;
    *now = *later = (unsigned)read_number("mig", 0);
    return OK;
}

static int copy_text(const char *what, const char *otherwise, char *text, unsigned size)
{
    if (!read_text(what, text, size))
        snprintf(text, size, "%s", otherwise);
    return OK;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) { return copy_text("driver", "580.65.06", text, size); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return cuDriverGetVersion(version); }
int nvmlDeviceGetName(void *device, char *text, unsigned size)
{
    (void)device;
    return copy_text("name", "stand-in", text, size);
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned size)
{
    (void)device;
    return copy_text("uuid", "GPU-0", text, size);
}
int nvmlDeviceGetComputeMode(void *device, unsigned *mode)
{
    (void)device;
    return *mode = (unsigned)read_number("compute", 0), OK;
}
int nvmlDeviceGetPersistenceMode(void *device, unsigned *mode)
{
    (void)device;
    return *mode = (unsigned)read_number("persistence", 1), OK;
}

int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory)
{
    struct process found[MOST];
    GpuFile *gpu = simulated((unsigned)(uintptr_t)device - 1);
    if (gpu && gpu_word(&gpu->lost))
        return NVML_GPU_IS_LOST;
    memory->total = gpu ? (unsigned long long)gpu->capacity : (unsigned long long)read_number("total", 81920) << 20;
    memory->used = 0;
    for (unsigned count = processes(device, found); count--;)
        memory->used += found[count].used;
    memory->free = memory->total > memory->used ? memory->total - memory->used : 0;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *memory)
{
    struct memory first;
    int result = nvmlDeviceGetMemoryInfo(device, &first);
    if (result == OK)
        *memory = (struct memory_v2){memory->version, first.total, 0, first.free, first.used};
    return result;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *room, struct process *list)
{
    struct process found[MOST];
    unsigned count = processes(device, found), had = *room;
    *room = count;
    if (count > had)
        return NVML_INSUFFICIENT_SIZE;
    if (count)
        memcpy(list, found, count * sizeof *list);
    return OK;
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *room, struct process *list)
{
    if (read_number("mps", 0))
        return nvmlDeviceGetComputeRunningProcesses_v3(device, room, list);
    return *room = 0, OK;
}

/* The time since the last look of this process, in which work of one process ran, or of any. */
struct look { int64_t pid, at_ns, busy_ns; };

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Return the percentage of the time since a look, -1 for a process that it did not see, and look again. */
static int percent_since(struct look *last, int64_t pid, int64_t busy_ns)
{
    struct look now = {pid, now_ns(), busy_ns};
    int64_t span = now.at_ns - last->at_ns, busy = busy_ns - last->busy_ns;
    int known = last->at_ns && last->pid == pid && span > 0;
    *last = now;
    return !known ? -1 : busy >= span ? 100 : (int)(100 * busy / span);
}

int nvmlDeviceGetUtilizationRates(void *device, struct utilization *found)
{
    static struct look looks[8];
    unsigned index = (unsigned)(uintptr_t)device - 1;
    GpuFile *gpu = simulated(index);
    int64_t busy_ns = 0;
    if (!gpu)
        return NVML_NOT_SUPPORTED;
    for (GpuOwner *owner = gpu->owners; owner < gpu->owners + GPU_OWNERS; owner++)
        busy_ns += gpu_word(&owner->busy_ns);
    int percent = percent_since(&looks[index], 0, busy_ns);
    return *found = (struct utilization){percent < 0 ? 0 : (unsigned)percent, 0}, OK;
}

/* One sample of each process that used the GPU since the last call; the caller asks for their number first. */
int nvmlDeviceGetProcessUtilization(void *device, struct sample *list, unsigned *room, unsigned long long since_us)
{
    static struct look looks[8][GPU_OWNERS];
    unsigned index = (unsigned)(uintptr_t)device - 1, count = 0;
    GpuFile *gpu = simulated(index);
    if (!gpu)
        return NVML_NOT_SUPPORTED;
    if (!list)
        return *room = GPU_OWNERS, NVML_INSUFFICIENT_SIZE;
    for (unsigned row = 0; row < GPU_OWNERS && count < *room; row++) {
        int64_t pid = gpu_word(&gpu->owners[row].pid);
        int percent = pid ? percent_since(&looks[index][row], pid, gpu_word(&gpu->owners[row].busy_ns)) : -1;
        unsigned long long at_us = (unsigned long long)looks[index][row].at_ns / 1000;
        if (percent > 0 && at_us > since_us)
            list[count++] = (struct sample){(unsigned)pid, at_us, (unsigned)percent, 0, 0, 0};
    }
    return *room = count, count ? OK : NVML_NOT_FOUND;
}
