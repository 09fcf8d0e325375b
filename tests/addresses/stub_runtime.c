/* A libcudart for tests, which must be linked with the version of its symbols that CUDA's has (libcudart.so.13). Its
 * memory is malloc's; its first call in a thread makes the thread's context, as CUDA's does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2 };

long stub_runtime_mallocs, stub_runtime_frees, stub_runtime_others;

static void make_context(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    void (*use_device)(int) = driver ? (void (*)(int))dlsym(driver, "stub_use_device") : NULL;
    int (*current)(void **) = driver ? (int (*)(void **))dlsym(driver, "cuCtxGetCurrent") : NULL;
    void *context = NULL;
    if (use_device && !current(&context) && !context)
        use_device(0);
}

int cudaMalloc(void **where, size_t size)
{
    make_context();
    __atomic_add_fetch(&stub_runtime_mallocs, 1, __ATOMIC_RELAXED);
    return (*where = malloc(size)) ? 0 : OUT_OF_MEMORY;
}

int cudaFree(void *where)
{
    make_context();
    __atomic_add_fetch(&stub_runtime_frees, where != NULL, __ATOMIC_RELAXED);
    free(where);
    return 0;
}

int cudaIpcGetMemHandle(void *export, void *where)
{
    stub_runtime_others++;
    return export && where ? 0 : INVALID_VALUE;
}
int cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    stub_runtime_others++;
    return peer < 0 || flags ? INVALID_VALUE : 0;
}
