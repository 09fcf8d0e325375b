/* What the files of the plugin share. Only cadenza.c and job.c know Slurm. */
#ifndef CADENZA_H
#define CADENZA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define CADENZA_VERSION "0.1.0"
#define MAX_GPUS 64
#define MAX_NAME 256
#define MAX_OPTIONS 256
#define MAX_PACKET 4096
#define MAX_WHY 256

/* What the user asked for: --cadenza[=key=value,...]. Zero means "not given", except for priority. */
struct options {
	bool share;
	long min_gpus;
	long max_gpus;
	long priority;
	char model[65];
	long iterations;
	long duration_s;
	bool batch_per_gpu;
};

/* Arguments of the plugstack line. */
struct config {
	char socket[108];
	int wait_s;
};

/* One incarnation of a job on one (lane of a) host, as the agent needs it. */
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
	uint32_t cpus; /* of the whole job on this host; 0: a step does not know */
	uint64_t memory_mb;
	char user[MAX_NAME];
	char node[MAX_NAME];
	char options[MAX_OPTIONS]; /* the text, once options_parse has taken it */
	bool batch_per_gpu; /* what the script is told of its batch on another number of GPUs */
};

enum verdict {
	LEASE_GRANTED,
	AGENT_ABSENT,  /* no socket: this host runs no agent */
	AGENT_SILENT,  /* the bound is over */
	AGENT_GIVES_UP /* the agent asks for the place back */
};

/* options.c: fills in options and returns 0, or writes why not and returns -1. */
int options_parse(const char *text, struct options *options, char *why, size_t size);

/* config.c: takes one plugstack argument and returns 0, or writes why not and returns -1. */
int config_argument(struct config *config, const char *argument, char *why, size_t size);

/* message.c: the packets of the wire, and what can be read from names and lists. */
int lane_of(const char *node);
size_t parse_gpus(const char *list, int *gpus, size_t room);
size_t start_message(const struct job *job, char *packet, size_t size);
size_t end_message(uint32_t id, char *packet, size_t size);

/* handover.c: from the prolog to the tasks of the job. */
enum word { WORD_NONE, WORD_NO, WORD_YES };
enum word comment_word(const char *comment);
bool comment_batch_per_gpu(const char *comment);
void handover_keep(const struct config *config);
bool handover_read(const struct config *config, struct job *job, enum word *word);
void handover_drop(const struct config *config);

/* job.c: fills in all but the user; false when the step has no GPU here. job_requeue returns 0 when it went well. */
struct spank_handle;
extern struct spank_option cadenza_option;
bool job_of_task(struct spank_handle *spank, const struct config *config, struct job *job);
int job_requeue(uint32_t id);

/* leftover.c: ends what is left of this batch step, and waits at most 0.2 s until it is gone. */
void leftover_end(void);

/* agent.c */
enum verdict agent_wait(const struct job *job, const struct config *config);
void agent_tell_end(uint32_t id, const struct config *config);

#endif
