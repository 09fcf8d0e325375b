/* The grammar of --cadenza[=key=value,...] and of its environment twin. */
#include "cadenza.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEYS \
	"share, late, graphs, summary, checkpoints, min_gpus, max_gpus, batch, model, priority, iterations, duration_s, or " \
	"off alone"

static int refuse(char *reason, size_t size, const char *key, const char *rule, const char *value)
{
	snprintf(reason, size, "%s %s, not '%.80s'", key, rule, value);
	return -1;
}

static int number(const char *value, long low, long high, long *out)
{
	char *end;
	const char *digits = *value == '-' ? value + 1 : value;

	errno = 0;
	*out = strtol(value, &end, 10);
	return isdigit((unsigned char)*digits) && !*end && !errno && *out >= low && *out <= high ? 0 : -1;
}

static bool model_name(const char *value)
{
	size_t length = strspn(value, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-");

	return length >= 1 && length <= 64 && !value[length];
}

static int set_flag(bool *flag, const char *key, const char *value, char *reason, size_t size)
{
	*flag = !strcmp(value, "yes");
	if (*flag || !strcmp(value, "no"))
		return 0;
	return refuse(reason, size, key, "is yes or no", value);
}

static int set_batch(struct options *options, const char *value, char *reason, size_t size)
{
	options->batch_per_gpu = !strcmp(value, "per-gpu");
	if (options->batch_per_gpu || !strcmp(value, "global"))
		return 0;
	return refuse(reason, size, "batch", "is global or per-gpu", value);
}

static int set_model(struct options *options, const char *value, char *reason, size_t size)
{
	if (!model_name(value))
		return refuse(reason, size, "model", "is 1 to 64 of the characters A-Z a-z 0-9 . _ -", value);
	strcpy(options->model, value);
	return 0;
}

static int set_option(struct options *options, const char *key, const char *value, char *reason, size_t size)
{
	if (!strcmp(key, "share"))
		return set_flag(&options->share, key, value ? value : "yes", reason, size);
	if (!strcmp(key, "late"))
		return set_flag(&options->late, key, value ? value : "yes", reason, size);
	if (!strcmp(key, "graphs"))
		return set_flag(&options->graphs, key, value ? value : "yes", reason, size);
	if (!strcmp(key, "summary"))
		return set_flag(&options->summary, key, value ? value : "yes", reason, size);
	if (!strcmp(key, "checkpoints"))
		return set_flag(&options->checkpoints, key, value ? value : "yes", reason, size);
	if (!value)
		value = "";
	if (!strcmp(key, "model"))
		return set_model(options, value, reason, size);
	if (!strcmp(key, "batch"))
		return set_batch(options, value, reason, size);
	if (!strcmp(key, "min_gpus"))
		return number(value, 1, 65535, &options->min_gpus)
			       ? refuse(reason, size, key, "is a number from 1 to 65535", value) : 0;
	if (!strcmp(key, "max_gpus"))
		return number(value, 1, 65535, &options->max_gpus)
			       ? refuse(reason, size, key, "is a number from 1 to 65535", value) : 0;
	if (!strcmp(key, "priority"))
		return number(value, -1000000, 1000000, &options->priority)
			       ? refuse(reason, size, key, "is a number from -1000000 to 1000000", value) : 0;
	if (!strcmp(key, "iterations"))
		return number(value, 1, 2000000000, &options->iterations)
			       ? refuse(reason, size, key, "is a number from 1 to 2000000000", value) : 0;
	if (!strcmp(key, "duration_s"))
		return number(value, 1, 2000000000, &options->duration_s)
			       ? refuse(reason, size, key, "is a number from 1 to 2000000000", value) : 0;
	snprintf(reason, size, "unknown key '%.80s' (known: " KEYS ")", key);
	return -1;
}

static int set_items(struct options *options, char *text, char *reason, size_t size)
{
	char *item;

	while ((item = strsep(&text, ","))) {
		char *value = strchr(item, '=');

		if (value)
			*value++ = '\0';
		if (set_option(options, item, value, reason, size))
			return -1;
	}
	return 0;
}

/* Slurm passes an option without argument as "" or as "(null)". */
int options_parse(const char *text, struct options *options, char *reason, size_t size)
{
	char copy[MAX_OPTIONS];

	memset(options, 0, sizeof(*options));
	options->share = true;
	if (!text || !*text || !strcmp(text, "(null)"))
		return 0;
	if (strlen(text) >= sizeof(copy))
		return refuse(reason, size, "the value", "has at most 255 characters", text);
	if (!strcmp(text, "off")) {
		options->share = false;
		return 0;
	}
	strcpy(copy, text);
	if (set_items(options, copy, reason, size))
		return -1;
	if (options->min_gpus && options->max_gpus && options->min_gpus > options->max_gpus) {
		snprintf(reason, size, "min_gpus=%ld is more than max_gpus=%ld", options->min_gpus, options->max_gpus);
		return -1;
	}
	return 0;
}
