/* Slurm's data about a task's job, and its requeue. */
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

/* A step without GPUs (--gres=none) needs no lease even when its job has GPUs. */
static bool step_has_gpus(spank_t spank, const struct job *job, char *list, int size)
{
	bool script = job->step == SLURM_BATCH_SCRIPT || job->step == SLURM_INTERACTIVE_STEP;

	return task_variable(spank, script ? "SLURM_JOB_GPUS" : "SLURM_STEP_GPUS", list, size) && *list;
}

/*
 * Slurm tells the restart to the batch script alone, whose steps have it in their environment. It is the user's to
 * change, so it only says where to ask Slurm.
 */
static uint32_t restart_told(spank_t spank, uint32_t id)
{
	unsigned int job = 0, restart = 0;
	char text[32];

	if (!task_variable(spank, START_VARIABLE, text, sizeof(text)) || sscanf(text, "%u.%u", &job, &restart) != 2)
		return 0;
	return job == id && restart <= INT32_MAX ? restart : 0;
}

/* By squeue, for the reason that job_requeue has. Returns 0 where Slurm does not answer. */
static uint32_t restart_in_slurm(uint32_t id)
{
	unsigned int job = 0, restart = 0, found = 0;
	char command[80];
	FILE *answer;

	snprintf(command, sizeof(command), "squeue --noheader --jobs=%u --Format=JobID,RestartCnt 2>/dev/null", id);
	answer = popen(command, "re");
	if (!answer)
		return 0;
	while (fscanf(answer, "%u %u", &job, &restart) == 2) /* an array's other tasks have the same number */
		found = job == id ? restart : found;
	pclose(answer);
	return found;
}

/* CPUs and memory of the job here. Only the script has all CPUs of the job; another step may have a part. */
static void read_size(spank_t spank, struct job *job)
{
	uint16_t cpus = 0;

	if (job->step == SLURM_BATCH_SCRIPT && spank_get_item(spank, S_JOB_NCPUS, &cpus) == ESPANK_SUCCESS)
		job->cpus = cpus;
	spank_get_item(spank, S_JOB_ALLOC_MEM, &job->memory_mb);
}

/* The comment holds the merged options; the flag counts only if the comment does not decide. */
static void read_options(spank_t spank, struct job *job, enum sharing sharing)
{
	char reason[MAX_REASON], *flag = NULL;
	struct options options;

	job->managed = sharing == SHARING_YES;
	if (spank_option_getopt(spank, &cadenza_option, &flag) != ESPANK_SUCCESS)
		return;
	if (options_parse(flag, &options, reason, sizeof(reason))) {
		slurm_error("cadenza: job %u: its options '%s' are ignored: %s", job->id, flag, reason);
		return;
	}
	if (sharing == SHARING_UNSET) {
		job->managed = options.share;
		job->batch_per_gpu = options.batch_per_gpu;
		job->late = options.late;
		job->graphs = options.graphs;
		job->summary = options.summary;
	}
	snprintf(job->options, sizeof(job->options), "%s", flag && strcmp(flag, "(null)") ? flag : "");
}

bool job_of_task(spank_t spank, const struct config *config, struct job *job)
{
	const char *node = getenv("SLURMD_NODENAME");
	enum sharing sharing = SHARING_UNSET;
	char gpus[512];
	bool found;

	memset(job, 0, sizeof(*job));
	spank_get_item(spank, S_JOB_ID, &job->id);
	spank_get_item(spank, S_JOB_STEPID, &job->step);
	spank_get_item(spank, S_JOB_UID, &job->uid);
	spank_get_item(spank, S_JOB_NNODES, &job->hosts);
	if (job->step == SLURM_BATCH_SCRIPT)
		spank_get_item(spank, S_SLURM_RESTART_COUNT, &job->restart);
	else
		job->restart = restart_told(spank, job->id);
	snprintf(job->node, sizeof(job->node), "%s", node ? node : "");
	job->lane = lane_of(job->node);
	read_size(spank, job);
	if (!step_has_gpus(spank, job, gpus, sizeof(gpus)))
		return false;
	found = handover_read(config, job, &sharing);
	if (!found && job->step != SLURM_BATCH_SCRIPT && job->restart) {
		job->restart = restart_in_slurm(job->id);
		found = handover_read(config, job, &sharing);
	}
	if (!found)
		job->gpu_count = parse_gpus(gpus, job->gpus, MAX_GPUS);
	read_options(spank, job, sharing);
	return job->gpu_count > 0;
}

bool job_came_back(spank_t spank, const struct config *config, bool flagged)
{
	const char *node = getenv("SLURMD_NODENAME");
	enum sharing sharing = SHARING_UNSET;
	struct job job = {0};

	spank_get_item(spank, S_JOB_ID, &job.id);
	spank_get_item(spank, S_JOB_STEPID, &job.step);
	spank_get_item(spank, S_SLURM_RESTART_COUNT, &job.restart);
	snprintf(job.node, sizeof(job.node), "%s", node ? node : "");
	handover_read(config, &job, &sharing); /* slurmstepd 26.05 leaves its own count at 0: the prolog's counts */
	if (job.step != SLURM_BATCH_SCRIPT || !job.restart)
		return false;
	return sharing == SHARING_YES || (sharing == SHARING_UNSET && flagged);
}

/* Uses scontrol, because the child of a threaded slurmstepd must not call Slurm's RPCs. Returns 0 on success. */
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
