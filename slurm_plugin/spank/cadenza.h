/* Declarations shared by the plugin's files. Only cadenza.c and job.c use Slurm's headers. */
#ifndef CADENZA_H
#define CADENZA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define CADENZA_VERSION "0.1.0"
/* Job and restart of the script, which its steps inherit: "7.2". */
#define START_VARIABLE "CADENZA_START"
#define MAX_GPUS 64
#define MAX_NAME 256
#define MAX_OPTIONS 256
#define MAX_PACKET 4096
#define MAX_REASON 256

/* The user's options: --cadenza[=key=value,...]. Zero means "not given", except for priority. */
struct options {
	bool share;
	long min_gpus;
	long max_gpus;
	long priority;
	char model[65];
	long iterations;
	long duration_s;
	bool batch_per_gpu;
	bool late;
	bool graphs;
	bool summary;
	bool checkpoints; /* only checked here: the service reads the comment, where it may be absent */
};

/* Arguments of the plugstack line. */
struct config {
	char socket[108];
	int wait_s;
};

/* One incarnation of a job on one host, or one lane of it, as the agent needs it. */
struct job {
	uint32_t id;
	uint32_t restart;
	uint32_t step;
	uint32_t hosts;
	uid_t uid;
	int lane;
	bool managed;
	size_t gpu_count;
	int gpus[MAX_GPUS];
	uint32_t cpus; /* of the whole job on this host; 0: not known in a step */
	uint64_t memory_mb;
	char user[MAX_NAME];
	char node[MAX_NAME];
	char options[MAX_OPTIONS]; /* the text, if options_parse has accepted it */
	bool batch_per_gpu; /* rule for the script's batch on another number of GPUs */
	bool late; /* it asks for its lease by itself, when it needs its GPUs */
	bool graphs; /* its device addresses stay at a yield */
	bool summary; /* its client says at the end what sharing took */
	bool unheard; /* one of its steps has waited in vain for the agent's first word */
};

enum verdict {
	LEASE_GRANTED, /* or the job asks for it later */
	AGENT_ABSENT,  /* no socket: this host runs no agent */
	AGENT_SILENT,  /* the time limit is over */
	AGENT_GIVES_UP /* the agent wants the job to be requeued */
};

/* options.c: fills in options and returns 0, or writes the reason and returns -1. */
int options_parse(const char *text, struct options *options, char *reason, size_t size);

/* config.c: sets one plugstack argument and returns 0, or writes the reason and returns -1. */
int config_argument(struct config *config, const char *argument, char *reason, size_t size);

/* message.c: the packets of the wire, and the parsing of node names and GPU lists. put_gpus writes "0,2". */
int lane_of(const char *node);
size_t parse_gpus(const char *list, int *gpus, size_t capacity);
void put_gpus(const struct job *job, char *out, size_t size);
const char *reason_of(const char *packet, char *out, size_t size);
size_t start_message(const struct job *job, char *packet, size_t size);
size_t end_message(uint32_t id, const char *node_name, char *packet, size_t size);

/*
 * job.c: fills in all but the user; false when the step has no GPU here. job_requeue returns 0 on success. job_came_back is
 * true in the script of a job that shares and was requeued; `flagged`: its option opts in, if its comment does not decide.
 */
struct spank_handle;
extern struct spank_option cadenza_option;
bool job_of_task(struct spank_handle *spank, const struct config *config, struct job *job);
bool job_came_back(struct spank_handle *spank, const struct config *config, bool flagged);
int job_requeue(uint32_t id);

/* leftover.c: kills the remaining processes of this batch step, and waits at most 0.2 s for their end. */
void leftover_end(void);

/*
 * preload.c: the library of addresses that stay, which the agent links beside its socket. preload_find resolves the link,
 * false without one. preload_without removes it from a value of LD_PRELOAD.
 */
bool preload_find(const struct config *config, char *path);
void preload_without(char *preload);

/* agent.c: messages to the agent, and the handover from the prolog to the job's tasks. */
enum sharing { SHARING_UNSET, SHARING_NO, SHARING_YES };
/* Announces that a job waits and the agent's reason; without a reason that it goes on. */
typedef void waiting_teller(const struct job *job, const char *reason);
int agent_limit_ms(const struct job *job, const struct config *config, bool reached);
enum verdict agent_wait(const struct job *job, const struct config *config, waiting_teller *tell);
void agent_report_end(uint32_t id, const struct config *config);
enum sharing comment_sharing(const char *comment);
bool comment_batch_per_gpu(const char *comment);
bool comment_late(const char *comment);
bool comment_graphs(const char *comment);
bool comment_summary(const char *comment);
void handover_write(const struct config *config);
bool handover_read(const struct config *config, struct job *job, enum sharing *sharing);
void handover_remove(const struct config *config);

#endif
