/* The packets that the plugin sends (JSON, described in sidecar/wire.py), and the parsing of names and lists. */
#include "cadenza.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* "node7-l2" is lane 2 of its host; every other name is lane 0. */
int lane_of(const char *node)
{
	const char *suffix = strrchr(node, '-');
	char *end;
	long lane;

	if (!suffix || suffix[1] != 'l' || !isdigit((unsigned char)suffix[2]))
		return 0;
	lane = strtol(suffix + 2, &end, 10);
	return *end || lane > 1000 ? 0 : (int)lane;
}

/* "0,2-3" gives 0 2 3; parsing ends at the first character that does not belong to a list. */
size_t parse_gpus(const char *list, int *gpus, size_t capacity)
{
	size_t count = 0;
	char *end;

	while (isdigit((unsigned char)*list)) {
		long first = strtol(list, &end, 10), last = first;

		if (*end == '-')
			last = strtol(end + 1, &end, 10);
		for (; first <= last && first < 1024 && count < capacity; first++)
			gpus[count++] = (int)first;
		list = *end == ',' ? end + 1 : end;
	}
	return count;
}

/* Names of users and nodes without the characters that JSON would have to escape. */
static const char *plain(const char *name, char *out)
{
	size_t length = 0;

	for (; *name && length < MAX_NAME - 1; name++)
		if ((unsigned char)*name >= ' ' && *name != '"' && *name != '\\')
			out[length++] = *name;
	out[length] = '\0';
	return out;
}

void put_gpus(const struct job *job, char *out, size_t size)
{
	size_t used = 0;

	*out = '\0';
	for (size_t i = 0; i < job->gpu_count && used < size; i++)
		used += (size_t)snprintf(out + used, size - used, i ? ",%d" : "%d", job->gpus[i]);
}

size_t start_message(const struct job *job, char *packet, size_t size)
{
	char gpus[MAX_GPUS * 6], user[MAX_NAME], node[MAX_NAME];

	put_gpus(job, gpus, sizeof(gpus));
	return (size_t)snprintf(packet, size,
				"{\"v\":1,\"type\":\"start\",\"job\":%u,\"restart\":%u,\"uid\":%u,\"user\":\"%s\","
				"\"node\":\"%s\",\"lane\":%d,\"gpus\":[%s],\"hosts\":%u,\"managed\":%s,\"step\":%u,"
				"\"options\":\"%s\",\"cpus\":%u,\"memory_mb\":%llu,\"late\":%s}",
				job->id, job->restart, (unsigned)job->uid, plain(job->user, user),
				plain(job->node, node), job->lane, gpus, job->hosts, job->managed ? "true" : "false",
				job->step, job->options, job->cpus, (unsigned long long)job->memory_mb,
				job->late ? "true" : "false");
}

/*
 * Copies the reason of the agent's answer, which is JSON in ASCII. Escaped characters other than quotes and backslashes
 * become '?'; an answer without a reason gives an empty text.
 */
const char *reason_of(const char *packet, char *out, size_t size)
{
	static const char name[] = "\"reason\"";
	const char *at = strstr(packet, name);
	size_t length = 0;

	*out = '\0';
	at = at ? strchr(at + sizeof(name) - 1, '"') : NULL;
	if (!at)
		return out;
	for (at++; *at && *at != '"' && length + 1 < size; at++) {
		char letter = *at;

		if (letter == '\\') {
			letter = *++at == '"' || *at == '\\' ? *at : '?';
			if (!*at)
				break;
			if (*at == 'u')
				at += strnlen(at + 1, 4);
		}
		out[length++] = letter >= ' ' && letter <= '~' ? letter : '?';
	}
	out[length] = '\0';
	return out;
}

/*
 * Ends all incarnations of the job on this node: after a requeue, the epilog has the next restart count already. A
 * slurmctld that was killed may have started the job anew on another lane of this host.
 */
size_t end_message(uint32_t id, const char *node_name, char *packet, size_t size)
{
	char node[MAX_NAME];

	return (size_t)snprintf(packet, size, "{\"v\":1,\"type\":\"end\",\"job\":%u,\"node\":\"%s\"}", id,
				plain(node_name, node));
}
