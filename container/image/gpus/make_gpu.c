/* Make simulated GPUs for all users of a host: make_gpu BYTES FILE… */
#include <stdlib.h>

#include "gpu_file.h"

int main(int count, char **words)
{
    umask(0);
    for (int index = 2; index < count; index++) {
        int error = gpu_create(words[index]);
        GpuFile *gpu = error ? NULL : gpu_open(words[index]);
        if (!gpu)
            return fprintf(stderr, "%s: %s\n", words[index], strerror(error)), 1;
        gpu->capacity = atoll(words[1]);
        gpu->context_bytes = 1 << 20;
    }
    return 0;
}
