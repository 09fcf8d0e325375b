/* The SPANK plugin: the --cadenza option where jobs are submitted, the wait for the first lease where they run. */
#include "cadenza.h"

#include <limits.h>
#include <pwd.h>
#include <signal.h>
#include <slurm/slurm.h>
#include <slurm/spank.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

SPANK_PLUGIN(cadenza, 1)

#define TWIN "CADENZA"
/* Variable in which salloc and sbatch export the option, and which Slurm reads as the option. */
#define SLURM_TWIN "SLURM_SPANK__SLURM_SPANK_OPTION_cadenza_cadenza"
/* Read by the client (ADDRESSES_ENV); a job that submits another one does not hand it on. */
#define ADDRESSES_VARIABLE "CADENZA_ADDRESSES"
#define MAX_PRELOAD 4096
#define GATE_TICK_US 20000
#define REQUEUE_LIMIT_S 120
#define LONG_WAIT_S 86400

/* Shared by the tasks of a step on this host: the first task asks for the lease of all. */
struct gate {
	atomic_int first_pid;
	atomic_int open;
	atomic_int managed;
};

/* The configuration of this process, which is that of slurm.conf; slurmstepd exports it for Slurm's own plugins. */
extern slurm_conf_t slurm_conf __attribute__((weak));

static struct {
	struct config config;
	struct gate *gate;
	char user[MAX_NAME];
	bool flagged; /* this step's job has the option, and its value opts in */
} plugin = {.config = {.socket = "/run/cadenza/agent.sock", .wait_s = 30}};

static int option_given(int value, const char *text, int remote)
{
	const char *twin = getenv(TWIN);
	struct options options;
	char reason[MAX_REASON];

	(void)value;
	if (!options_parse(text, &options, reason, sizeof(reason))) {
		plugin.flagged = options.share;
		return ESPANK_SUCCESS;
	}
	/* The job has passed this check where it was submitted: an error in slurmstepd would fail it as it starts. */
	if (remote)
		return ESPANK_SUCCESS;
	slurm_error("cadenza: %s%s: %s", twin && text && !strcmp(twin, text) ? TWIN "=" : "--cadenza=", text, reason);
	return ESPANK_ERROR;
}

struct spank_option cadenza_option = {
	.name = "cadenza",
	.arginfo = "[key=value,...]",
	.usage = "[cadenza] make way for other jobs, and share GPUs; keys: share=yes|no checkpoints=yes|no late=yes|no "
		 "graphs=yes|no summary=yes|no iterations=N duration_s=N min_gpus=N max_gpus=N batch=global|per-gpu "
		 "model=NAME priority=N; 'off' opts out; CADENZA in the environment does the same",
	.has_arg = 2,
	.cb = option_given,
};

/*
 * A job submitted from within a job does not inherit the outer job's option. A step keeps its job's option and has no
 * twin. Slurm itself reads the twin before the command line, so the command line takes precedence.
 */
static void read_environment(spank_context_t context)
{
	const char *twin = getenv(TWIN);
	char *preload = getenv("LD_PRELOAD");

	if (context == S_CTX_ALLOCATOR && getenv("SLURM_JOB_ID")) {
		unsetenv(ADDRESSES_VARIABLE);
		if (preload)
			preload_without(preload);
		if (preload && !*preload)
			unsetenv("LD_PRELOAD");
	}
	if (context == S_CTX_LOCAL && getenv("SLURM_JOB_ID"))
		return;
	/* srun and sbatch within a job inherit the outer job's value of it. */
	unsetenv(SLURM_TWIN);
	if (twin && *twin)
		setenv(SLURM_TWIN, twin, 1);
}

static void read_arguments(int count, char **arguments)
{
	char reason[MAX_REASON];

	for (int i = 0; i < count; i++)
		if (config_argument(&plugin.config, arguments[i], reason, sizeof(reason)))
			slurm_error("cadenza: %s", reason);
}

int slurm_spank_init(spank_t spank, int count, char **arguments)
{
	spank_context_t context = spank_context();

	read_arguments(count, arguments);
	if (context == S_CTX_SLURMD)
		slurm_info("cadenza: version " CADENZA_VERSION ", built for Slurm %d.%02d.%d, agent at %s",
			   SLURM_VERSION_MAJOR(SLURM_VERSION_NUMBER), SLURM_VERSION_MINOR(SLURM_VERSION_NUMBER),
			   SLURM_VERSION_MICRO(SLURM_VERSION_NUMBER), plugin.config.socket);
	if (context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR)
		read_environment(context);
	if (context != S_CTX_SLURMD)
		return spank_option_register(spank, &cadenza_option);
	return ESPANK_SUCCESS;
}

/*
 * Slurm truncates the output file at a requeue, unless --open-mode or JobFileAppend says otherwise. A slurmstepd serves one
 * step, so what is set here is of this script alone; a mode that the user has chosen goes before it. The variable is the
 * one in which Slurm hands a chosen mode to the script's steps, whose own output files are opened by srun.
 */
static void keep_output(spank_t spank)
{
	if (!&slurm_conf) {
		slurm_info("cadenza: this slurmstepd exports no slurm_conf: output files are truncated at a requeue");
		return;
	}
	slurm_conf.job_file_append = 1;
	spank_setenv(spank, "SLURM_OPEN_MODE", "a", 0);
}

/*
 * Before the output files are opened and the tasks are forked: make the tasks' shared page, and look up the user, which is
 * not safe in a forked child.
 */
int slurm_spank_init_post_opt(spank_t spank, int count, char **arguments)
{
	const struct passwd *entry;
	void *page;
	uid_t uid;

	(void)count, (void)arguments;
	if (spank_context() != S_CTX_REMOTE || spank_get_item(spank, S_JOB_UID, &uid) != ESPANK_SUCCESS)
		return ESPANK_SUCCESS;
	entry = getpwuid(uid);
	if (entry)
		snprintf(plugin.user, sizeof(plugin.user), "%s", entry->pw_name);
	else
		snprintf(plugin.user, sizeof(plugin.user), "%u", (unsigned)uid);
	if (job_came_back(spank, &plugin.config, plugin.flagged))
		keep_output(spank);
	page = mmap(NULL, sizeof(struct gate), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	plugin.gate = page == MAP_FAILED ? NULL : page;
	return ESPANK_SUCCESS;
}

/* A requeue ends this task by a signal; this returns only if Slurm does not requeue the job. */
static void requeue(const struct job *job, const char *reason)
{
	slurm_error("cadenza: job %u: %s: its GPUs on %s are given back by a requeue", job->id, reason, job->node);
	/* slurmctld answers at once: its kill comes while this task sleeps. */
	if (!job_requeue(job->id))
		sleep(REQUEUE_LIMIT_S);
	slurm_error("cadenza: job %u: not requeued: it keeps waiting for its lease", job->id);
}

/* Lane 0 is the host as it is without Cadenza, so a job there always starts; on further lanes none starts unleased. */
static bool starts_unleased(const struct job *job, enum verdict verdict)
{
	if (verdict == AGENT_ABSENT)
		slurm_info("cadenza: job %u: no agent on %s: it starts without a lease", job->id, job->node);
	else if (job->lane == 0 && (verdict == AGENT_SILENT || !job->managed))
		slurm_error("cadenza: job %u: no lease from the agent on %s in time: it starts without", job->id,
			    job->node);
	else
		return false;
	return true;
}

/* slurm_spank_log reaches the terminal of srun and the output file of a batch script; slurm_info does not. */
static void tell_waiting(const struct job *job, const char *reason)
{
	char gpus[MAX_GPUS * 6];

	put_gpus(job, gpus, sizeof(gpus));
	if (reason)
		slurm_spank_log("cadenza: job %u waits for GPU %s of %s: %s. It goes on by itself; `scancel %u` gives up",
				job->id, gpus, job->node, *reason ? reason : "its turn has not come", job->id);
	else
		slurm_spank_log("cadenza: job %u has its GPUs and goes on", job->id);
}

static void wait_for_lease(const struct job *job)
{
	struct config config = plugin.config;
	enum verdict verdict;

	while ((verdict = agent_wait(job, &config, tell_waiting)) != LEASE_GRANTED && !starts_unleased(job, verdict)) {
		requeue(job, verdict == AGENT_SILENT ? "no answer from the agent" : "the agent gives up");
		config.wait_s = LONG_WAIT_S;
	}
}

static void wait_for_first_task(const struct gate *gate)
{
	while (!gate->open && (!gate->first_pid || !kill(gate->first_pid, 0)))
		usleep(GATE_TICK_US);
}

static void enter(spank_t spank, const struct job *job)
{
	int task = 0;

	spank_get_item(spank, S_TASK_ID, &task);
	if (plugin.gate && task > 0) {
		wait_for_first_task(plugin.gate);
		return;
	}
	/* The other tasks look whether this one lives: it may be canceled while it waits. */
	if (plugin.gate)
		plugin.gate->first_pid = getpid();
	wait_for_lease(job);
	if (plugin.gate)
		plugin.gate->open = 1;
}

/*
 * The client then lets the addresses of the GPU's memory stay, for which a library must be there when a process starts.
 * Without it the client says so. Buffers of captured collectives that NCCL has registered would not survive a yield.
 */
static void preload(spank_t spank)
{
	char library[PATH_MAX], others[MAX_PRELOAD] = "", value[PATH_MAX + 1 + MAX_PRELOAD];

	spank_setenv(spank, ADDRESSES_VARIABLE, "stay", 1);
	if (!preload_find(&plugin.config, library) ||
	    spank_getenv(spank, "LD_PRELOAD", others, sizeof(others)) == ESPANK_NOSPACE)
		return;
	preload_without(others);
	snprintf(value, sizeof(value), "%s%s%s", library, *others ? ":" : "", others);
	spank_setenv(spank, "LD_PRELOAD", value, 1);
	spank_setenv(spank, "NCCL_GRAPH_REGISTER", "0", 0);
}

/* Unblocks SIGTERM, which slurmstepd's tasks block until they are executed, so that a waiting task can be canceled. */
int slurm_spank_task_init_privileged(spank_t spank, int count, char **arguments)
{
	struct sigaction standard = {.sa_handler = SIG_DFL}, action;
	sigset_t terminate, mask;
	struct job job;
	char lane[16], start[32];

	(void)count, (void)arguments;
	if (!job_of_task(spank, &plugin.config, &job))
		return ESPANK_SUCCESS;
	snprintf(job.user, sizeof(job.user), "%s", plugin.user);
	sigemptyset(&terminate);
	sigaddset(&terminate, SIGTERM);
	sigaction(SIGTERM, &standard, &action);
	sigprocmask(SIG_UNBLOCK, &terminate, &mask);
	if (plugin.gate)
		plugin.gate->managed = job.managed;
	if (job.managed) /* the user's rule for the batch of a job that may be resized; client.batch() reads it */
		spank_setenv(spank, "CADENZA_BATCH", job.batch_per_gpu ? "per-gpu" : "global", 1);
	if (job.managed && job.late) /* cadenza run then asks for the lease before the first use of a GPU */
		spank_setenv(spank, "CADENZA_LATE", "1", 1);
	if (job.managed && job.graphs)
		preload(spank);
	if (job.managed && job.summary)
		spank_setenv(spank, "CADENZA_SUMMARY", "1", 1);
	else /* that of the job which submitted this one */
		spank_unsetenv(spank, "CADENZA_SUMMARY");
	snprintf(start, sizeof(start), "%u.%u", job.id, job.restart);
	if (job.step == SLURM_BATCH_SCRIPT || job.step == SLURM_INTERACTIVE_STEP)
		spank_setenv(spank, START_VARIABLE, start, 1);
	enter(spank, &job);
	spank_unsetenv(spank, "CADENZA_LANE"); /* a job that submits another one hands its own on */
	snprintf(lane, sizeof(lane), "%d", job.lane);
	if (job.managed && !access(plugin.config.socket, F_OK)) /* the client then names a mount that a container lacks */
		spank_setenv(spank, "CADENZA_LANE", lane, 1);
	sigprocmask(SIG_SETMASK, &mask, NULL);
	sigaction(SIGTERM, &action, NULL);
	return ESPANK_SUCCESS;
}

int slurm_spank_task_exit(spank_t spank, int count, char **arguments)
{
	uint32_t step = 0;

	(void)count, (void)arguments;
	spank_get_item(spank, S_JOB_STEPID, &step);
	if (step == SLURM_BATCH_SCRIPT && plugin.gate && plugin.gate->managed)
		leftover_end();
	return ESPANK_SUCCESS;
}

/* slurm_spank_init is not called for these two. They always return success, because any error drains the node. */
int slurm_spank_job_prolog(spank_t spank, int count, char **arguments)
{
	(void)spank;
	read_arguments(count, arguments);
	handover_write(&plugin.config);
	return ESPANK_SUCCESS;
}

int slurm_spank_job_epilog(spank_t spank, int count, char **arguments)
{
	const char *id = getenv("SLURM_JOB_ID"), *gpus = getenv("SLURM_JOB_GPUS");

	(void)spank;
	read_arguments(count, arguments);
	handover_remove(&plugin.config);
	if (id && gpus && *gpus)
		agent_report_end((uint32_t)strtoul(id, NULL, 10), &plugin.config);
	return ESPANK_SUCCESS;
}
