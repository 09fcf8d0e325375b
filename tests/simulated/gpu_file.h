/* The file behind one simulated GPU: its capacity, its processes and their bytes, its speed and its faults.
 *
 * All processes map the same file, and simulated_gpu.py reads and writes the words by name, so both must list the same
 * fields. The mutex is robust: a process that dies with it leaves a table that the next one can use. */
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define GPU_MAGIC 0x3150475341434431ULL
#define GPU_OWNERS 64

enum { OWNER_RUNNING, OWNER_LOCKED, OWNER_CHECKPOINTED, OWNER_FAILED };
enum { MEMORY_UNKNOWN, MEMORY_PRESENT, MEMORY_AWAY };

typedef struct {
    int64_t pid;
    int64_t started; /* clock ticks since boot, proc_pid_stat(5): a reused pid differs */
    int64_t bytes;   /* on the GPU: context and segments */
    int64_t saved;   /* bytes that a process checkpoint took away */
    int64_t state;
    int64_t busy_ns; /* time in which its operators and copies ran */
    int64_t memory;  /* where the process has its device memory now; unknown for one that only has a row here */
} GpuOwner;

typedef struct {
    uint64_t magic;
    int64_t capacity;
    int64_t context_bytes;     /* per process, from its first use to its end */
    int64_t bytes_per_s;       /* of the link, each way; 0: as fast as this machine copies */
    int64_t operator_ns;       /* shortest time of an operator or copy */
    int64_t pin_ns_per_page;   /* time to register a page */
    int64_t fail_allocation;   /* the n-th allocation from now fails; 0: none. Likewise: */
    int64_t fail_registration;
    int64_t fail_copy;
    int64_t fail_creation;     /* of the driver's virtual memory */
    int64_t drop_copy;         /* between host and device: it moves nothing, and says nothing */
    int64_t hang;              /* not 0: operators and copies do not begin */
    int64_t lost;              /* not 0: every call fails */
    GpuOwner owners[GPU_OWNERS];
    pthread_mutex_t lock;
} GpuFile;

static inline int64_t gpu_word(const int64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

/* Count an injected fault down; return whether this is the call that fails. */
static inline int gpu_fault(int64_t *word)
{
    return gpu_word(word) > 0 && __atomic_sub_fetch(word, 1, __ATOMIC_ACQ_REL) == 0;
}

static inline void gpu_sleep(int64_t ns)
{
    struct timespec left = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    while (ns > 0 && nanosleep(&left, &left) && errno == EINTR) {
    }
}

/* Return when a process started; 0 if it has ended. */
static inline int64_t gpu_started(int64_t pid)
{
    char path[64], text[1024], state = 0;
    unsigned long long started = 0;
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    size_t count = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[count] = 0;
    const char *fields = strrchr(text, ')'); /* the name in parentheses may hold anything */
    if (!fields || sscanf(fields + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                          &state, &started) != 2)
        return 0;
    return state == 'Z' || state == 'X' ? 0 : (int64_t)started;
}

static inline void gpu_lock(GpuFile *gpu)
{
    if (pthread_mutex_lock(&gpu->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&gpu->lock); /* each change of the table is one word */
}

static inline void gpu_unlock(GpuFile *gpu) { pthread_mutex_unlock(&gpu->lock); }

/* Create a GPU's file; simulated_gpu.py fills the words in. Return 0, or an errno. */
static inline int gpu_create(const char *path)
{
    int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0)
        return errno;
    if (ftruncate(file, sizeof(GpuFile)))
        return errno;
    GpuFile *gpu = (GpuFile *)mmap(NULL, sizeof *gpu, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (gpu == MAP_FAILED)
        return errno;
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&gpu->lock, &attributes);
    __atomic_store_n(&gpu->magic, GPU_MAGIC, __ATOMIC_RELEASE);
    munmap(gpu, sizeof *gpu);
    return 0;
}

/* Map a GPU's file; NULL if there is none. */
static inline GpuFile *gpu_open(const char *path)
{
    int file = open(path, O_RDWR | O_CLOEXEC);
    struct stat found;
    if (file < 0 || fstat(file, &found) || found.st_size != (off_t)sizeof(GpuFile)) {
        if (file >= 0)
            close(file);
        return NULL;
    }
    GpuFile *gpu = (GpuFile *)mmap(NULL, sizeof *gpu, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return gpu == MAP_FAILED || gpu->magic != GPU_MAGIC ? NULL : gpu;
}

/* Return the bytes in use, without those of processes that have ended; call with the lock. */
static inline int64_t gpu_used(GpuFile *gpu)
{
    int64_t used = 0;
    for (GpuOwner *owner = gpu->owners; owner < gpu->owners + GPU_OWNERS; owner++) {
        if (owner->pid && gpu_started(owner->pid) != owner->started)
            *owner = (GpuOwner){0, 0, 0, 0, 0, 0, 0};
        used += owner->bytes;
    }
    return used;
}

/* Return a process's row, a new one if it has none and ``add`` is set, else NULL; call with the lock. */
static inline GpuOwner *gpu_owner(GpuFile *gpu, int64_t pid, int add)
{
    GpuOwner *empty = NULL;
    for (GpuOwner *owner = gpu->owners; owner < gpu->owners + GPU_OWNERS; owner++) {
        if (owner->pid == pid)
            return owner;
        if (!owner->pid && !empty)
            empty = owner;
    }
    if (!add || !empty)
        return NULL;
    *empty = (GpuOwner){0, gpu_started(pid), 0, 0, OWNER_RUNNING, 0, MEMORY_UNKNOWN};
    empty->pid = pid;
    return empty;
}

/* Take bytes of the GPU for a process, or give them back (negative); 0, or -1 if there is no room. */
static inline int gpu_take(GpuFile *gpu, int64_t pid, int64_t bytes)
{
    gpu_lock(gpu);
    int room = bytes <= 0 || gpu_used(gpu) + bytes <= gpu->capacity;
    GpuOwner *owner = room ? gpu_owner(gpu, pid, bytes >= 0) : NULL;
    if (owner)
        owner->bytes += bytes;
    gpu_unlock(gpu);
    return owner ? 0 : -1;
}
