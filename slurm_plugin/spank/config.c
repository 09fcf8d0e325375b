/* The arguments of the plugstack line: socket=PATH wait=SECONDS. */
#include "cadenza.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int set_socket(struct config *config, const char *path, char *reason, size_t size)
{
	if (*path != '/' || strlen(path) >= sizeof(config->socket)) {
		snprintf(reason, size, "socket= is an absolute path of at most %zu characters, not '%.80s'",
			 sizeof(config->socket) - 1, path);
		return -1;
	}
	strcpy(config->socket, path);
	return 0;
}

static int set_wait(struct config *config, const char *text, char *reason, size_t size)
{
	char *end;
	long seconds = strtol(text, &end, 10);

	if (end == text || *end || seconds < 1 || seconds > 86400) {
		snprintf(reason, size, "wait= is a number of seconds from 1 to 86400, not '%.80s'", text);
		return -1;
	}
	config->wait_s = (int)seconds;
	return 0;
}

int config_argument(struct config *config, const char *argument, char *reason, size_t size)
{
	if (!strncmp(argument, "socket=", 7))
		return set_socket(config, argument + 7, reason, size);
	if (!strncmp(argument, "wait=", 5))
		return set_wait(config, argument + 5, reason, size);
	snprintf(reason, size, "unknown argument '%.80s' in plugstack.conf (known: socket=PATH wait=SECONDS)", argument);
	return -1;
}
