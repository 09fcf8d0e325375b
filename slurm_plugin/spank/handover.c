/*
 * What only Slurm's prolog is told and a task needs: restart count, this host's GPUs of the whole job, the comment's
 * words on sharing and on the batch. It is kept in JOBS/NODE.JOBID beside the agent's socket, by root and for root.
 */
#include "cadenza.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void path_of(const struct config *config, const char *node, uint32_t id, char *path, size_t size)
{
	int directory = (int)(strrchr(config->socket, '/') - config->socket);

	snprintf(path, size, "%.*s/jobs/%s.%u", directory, config->socket, node, id);
}

static uint32_t environment_number(const char *name)
{
	const char *text = getenv(name);

	return text ? (uint32_t)strtoul(text, NULL, 10) : 0;
}

/* The value of the comment's cadenza key when it is an object, else NULL. */
static const char *cadenza_object(const char *comment)
{
	while (comment && (comment = strstr(comment, "\"cadenza\""))) {
		comment += strlen("\"cadenza\"");
		comment += strspn(comment, " :\t\r\n");
		if (*comment == '{')
			break;
	}
	return comment;
}

/* Where the value of a key (in its quotes) begins in the object, which has no objects in it; NULL without the key. */
static const char *member(const char *object, const char *key)
{
	const char *found = object ? strstr(object, key) : NULL;

	if (!found || found > object + strcspn(object, "}"))
		return NULL;
	found += strlen(key);
	return found + strspn(found, " :\t\r\n");
}

/* {"cadenza":{...,"share":false}} says no, another cadenza object yes; without one the comment says nothing. */
enum word comment_word(const char *comment)
{
	const char *object = cadenza_object(comment), *share = member(object, "\"share\"");

	if (!object)
		return WORD_NONE;
	return share && !strncmp(share, "false", 5) ? WORD_NO : WORD_YES;
}

bool comment_batch_per_gpu(const char *comment)
{
	const char *batch = member(cadenza_object(comment), "\"batch\"");

	return batch && !strncmp(batch, "\"per-gpu\"", 9);
}

/* The directory of the socket is not made: a host without it has no agent. */
void handover_keep(const struct config *config)
{
	const char *node = getenv("SLURMD_NODENAME"), *gpus = getenv("SLURM_JOB_GPUS");
	char path[512];
	int fd;

	if (!node || !gpus || !*gpus)
		return;
	path_of(config, node, environment_number("SLURM_JOB_ID"), path, sizeof(path));
	*strrchr(path, '/') = '\0';
	mkdir(path, 0700);
	path_of(config, node, environment_number("SLURM_JOB_ID"), path, sizeof(path));
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd < 0)
		return;
	dprintf(fd, "%u %u %d %s %d\n", environment_number("SLURM_JOB_RESTART_COUNT"),
		environment_number("SLURM_JOB_NUM_NODES"), (int)comment_word(getenv("SLURM_JOB_COMMENT")), gpus,
		comment_batch_per_gpu(getenv("SLURM_JOB_COMMENT")));
	close(fd);
}

bool handover_read(const struct config *config, struct job *job, enum word *word)
{
	char path[512], gpus[512];
	uint32_t hosts;
	int code, batch_per_gpu = 0;
	FILE *file;
	bool read;

	path_of(config, job->node, job->id, path, sizeof(path));
	file = fopen(path, "re");
	if (!file)
		return false;
	read = fscanf(file, "%u %u %d %511s %d", &job->restart, &hosts, &code, gpus, &batch_per_gpu) >= 4;
	fclose(file);
	if (!read)
		return false;
	job->hosts = hosts ? hosts : job->hosts;
	job->gpu_count = parse_gpus(gpus, job->gpus, MAX_GPUS);
	job->batch_per_gpu = batch_per_gpu;
	*word = (enum word)code;
	return true;
}

void handover_drop(const struct config *config)
{
	const char *node = getenv("SLURMD_NODENAME");
	char path[512];

	path_of(config, node ? node : "", environment_number("SLURM_JOB_ID"), path, sizeof(path));
	unlink(path);
}
