/* The library of addresses that stay (sidecar/agent/addresses), as a part of LD_PRELOAD. */
#include "cadenza.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libcadenza-addresses.so"
/* What separates the parts of LD_PRELOAD. */
#define SEPARATORS ": "

bool preload_find(const struct config *config, char *path)
{
	int directory = (int)(strrchr(config->socket, '/') - config->socket);
	char link[sizeof(config->socket) + sizeof(LIBRARY)];

	snprintf(link, sizeof(link), "%.*s/" LIBRARY, directory, config->socket);
	/* What its path cannot say in LD_PRELOAD is not preloaded. */
	return realpath(link, path) && !strpbrk(path, SEPARATORS);
}

void preload_without(char *preload)
{
	char *out = preload, *part;

	for (char *rest = preload; (part = strsep(&rest, SEPARATORS));) {
		const char *name = strrchr(part, '/');
		size_t length = strlen(part);

		/* Two copies of the library would both serve cudaMalloc. */
		if (!length || !strcmp(name ? name + 1 : part, LIBRARY))
			continue;
		if (out != preload)
			*out++ = ':';
		memmove(out, part, length);
		out += length;
	}
	*out = '\0';
}
