/* What Slurm tells about the job of a task, and how its place is given back. */
#include "cadenza.h"

#include <slurm/slurm.h>
#include <slurm/spank.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static bool task_variable(spank_t spank, const char *name, char *out, int size)
{
	return spank_getenv(spank, name, out, size) == ESPANK_SUCCESS;
}

/* A step without GPUs (--gres=none) asks for no lease even when its job has some. */
static bool step_has_gpus(spank_t spank, const struct job *job, char *list, int size)
{
	bool script = job->step == SLURM_BATCH_SCRIPT || job->step == SLURM_INTERACTIVE_STEP;

	return task_variable(spank, script ? "SLURM_JOB_GPUS" : "SLURM_STEP_GPUS", list, size) && *list;
}

/* What the books give the job here. Only the script has all of its CPUs: another step may have been given a part. */
static void find_size(spank_t spank, struct job *job)
{
	uint16_t cpus = 0;

	if (job->step == SLURM_BATCH_SCRIPT && spank_get_item(spank, S_JOB_NCPUS, &cpus) == ESPANK_SUCCESS)
		job->cpus = cpus;
	spank_get_item(spank, S_JOB_ALLOC_MEM, &job->memory_mb);
}

/* The comment is where everything that was asked for has been merged; without its word the flag counts. */
static void find_options(spank_t spank, struct job *job, enum word word)
{
	char why[MAX_WHY], *flag = NULL;
	struct options options;

	job->managed = word == WORD_YES;
	if (spank_option_getopt(spank, &cadenza_option, &flag) != ESPANK_SUCCESS)
		return;
	if (options_parse(flag, &options, why, sizeof(why))) {
		slurm_error("cadenza: job %u: its options '%s' are ignored: %s", job->id, flag, why);
		return;
	}
	if (word == WORD_NONE) {
		job->managed = options.share;
		job->batch_per_gpu = options.batch_per_gpu;
	}
	snprintf(job->options, sizeof(job->options), "%s", flag && strcmp(flag, "(null)") ? flag : "");
}

bool job_of_task(spank_t spank, const struct config *config, struct job *job)
{
	const char *node = getenv("SLURMD_NODENAME");
	enum word word = WORD_NONE;
	char gpus[512];

	memset(job, 0, sizeof(*job));
	spank_get_item(spank, S_JOB_ID, &job->id);
	spank_get_item(spank, S_JOB_STEPID, &job->step);
	spank_get_item(spank, S_JOB_UID, &job->uid);
	spank_get_item(spank, S_JOB_NNODES, &job->hosts);
	spank_get_item(spank, S_SLURM_RESTART_COUNT, &job->restart);
	snprintf(job->node, sizeof(job->node), "%s", node ? node : "");
	job->lane = lane_of(job->node);
	find_size(spank, job);
	if (!step_has_gpus(spank, job, gpus, sizeof(gpus)))
		return false;
	if (!handover_read(config, job, &word))
		job->gpu_count = parse_gpus(gpus, job->gpus, MAX_GPUS);
	find_options(spank, job, word);
	return job->gpu_count > 0;
}

/* By scontrol, for Slurm's RPCs are not meant for the child of a threaded slurmstepd. Returns 0 when it went well. */
int job_requeue(uint32_t id)
{
	char text[16];
	char *arguments[] = {"scontrol", "requeue", text, NULL};
	int status;
	pid_t child;

	snprintf(text, sizeof(text), "%u", id);
	if (posix_spawnp(&child, arguments[0], NULL, NULL, arguments, environ))
		return -1;
	if (waitpid(child, &status, 0) != child || !WIFEXITED(status))
		return -1;
	return WEXITSTATUS(status);
}
