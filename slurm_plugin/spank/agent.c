/*
 * The node's agent: register a job, wait for its lease within a time limit, report its end.
 *
 * And the job's handover file, jobs/NODE.JOBID next to the agent's socket, written by root and for root. It has the
 * values that only Slurm's prolog knows and a task needs: restart count, this host's GPUs of the whole job, and the
 * comment's sharing, batch rule, late lease and addresses that stay. An agent that starts later reads the user as well, and
 * so knows the job. A step that has waited in vain for the agent adds a line.
 */
#include "cadenza.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define TICK_MS 250
/* Longest restart of an agent. During it the socket exists and refuses connections. */
#define RESTART_MS 5000

enum answer { GRANTED, WAIT, GIVEUP, REFUSED, SILENCE, LOST };

/* Sends one packet without blocking; a full backlog counts as a failure. Returns the socket, or -1 and errno. */
static int send_packet(const char *path, const char *packet, size_t length)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int saved, fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (fd < 0)
		return -1;
	snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
	/* Neither slurmstepd nor a task may end by SIGPIPE because the agent has. */
	if (!connect(fd, (struct sockaddr *)&address, sizeof(address)) &&
	    send(fd, packet, length, MSG_NOSIGNAL) == (ssize_t)length)
		return fd;
	saved = errno;
	close(fd);
	errno = saved;
	return -1;
}

static enum answer read_state(const char *packet)
{
	const char *state = strstr(packet, "\"state\"");

	if (!strstr(packet, "\"lease\"") || !state)
		return REFUSED;
	state += strlen("\"state\"");
	state += strspn(state, " :");
	if (!strncmp(state, "\"granted\"", 9) || !strncmp(state, "\"late\"", 6))
		return GRANTED;
	return strncmp(state, "\"giveup\"", 8) ? WAIT : GIVEUP;
}

static enum answer next_answer(int fd, char *packet)
{
	struct pollfd entry = {.fd = fd, .events = POLLIN};
	ssize_t length;
	int ready = poll(&entry, fd < 0 ? 0 : 1, TICK_MS);

	if (ready == 0)
		return SILENCE;
	if (ready < 0)
		return errno == EINTR ? WAIT : LOST;
	length = recv(fd, packet, MAX_PACKET - 1, MSG_DONTWAIT);
	if (length <= 0)
		return LOST;
	packet[length] = '\0';
	return read_state(packet);
}

/*
 * Longest silence of the agent. An unmanaged job counts its whole wait, because it takes no turns. Beside an agent that is
 * stopped only the first step waits for as long: the job has its GPUs since then, and each of its steps would wait anew.
 */
int agent_limit_ms(const struct job *job, const struct config *config, bool reached)
{
	int limit = config->wait_s * 1000;

	return job->lane == 0 && (!reached || job->unheard) && limit > RESTART_MS ? RESTART_MS : limit;
}

static void path_of(const struct config *config, const char *node, uint32_t id, char *path, size_t size)
{
	int directory = (int)(strrchr(config->socket, '/') - config->socket);

	snprintf(path, size, "%.*s/jobs/%s.%u", directory, config->socket, node, id);
}

/* Says to the job's further steps, in its handover file, that the agent did not answer. */
static void handover_mark(const struct config *config, const struct job *job)
{
	char path[512];
	int fd;

	path_of(config, job->node, job->id, path, sizeof(path));
	fd = open(path, O_WRONLY | O_APPEND | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return;
	dprintf(fd, "1\n");
	close(fd);
}

/*
 * Time is counted in ticks of silence and not read from a clock, so that a suspend does not use up the time limit: when
 * the job continues, its lease is in the socket. A wait for longer than a tick is announced by `tell`, before Slurm
 * suspends the job because it waits.
 */
enum verdict agent_wait(const struct job *job, const struct config *config, waiting_teller *tell)
{
	char packet[MAX_PACKET], reply[MAX_PACKET] = "", reason[MAX_REASON];
	size_t length = start_message(job, packet, sizeof(packet));
	bool reached = false, waits = false, told = false;
	int fd = -1;
	enum verdict verdict = AGENT_SILENT;

	for (int silent_ms = 0; silent_ms < agent_limit_ms(job, config, reached);) {
		enum answer answer;

		if (fd < 0)
			fd = send_packet(config->socket, packet, length);
		/* A host that was never given an agent has no socket; one whose agent restarts has one that refuses. */
		if (fd < 0 && errno == ENOENT && job->lane == 0 && !reached)
			return AGENT_ABSENT;
		reached = reached || fd >= 0;
		answer = next_answer(fd, reply);
		if (answer == SILENCE && waits && !told) {
			tell(job, reason_of(reply, reason, sizeof(reason)));
			told = true;
		}
		if (answer == GRANTED || answer == GIVEUP) {
			if (answer == GRANTED && told)
				tell(job, NULL);
			verdict = answer == GRANTED ? LEASE_GRANTED : AGENT_GIVES_UP;
			break;
		}
		waits = waits || (answer == WAIT && fd >= 0);
		if (answer == WAIT && job->managed)
			silent_ms = 0;
		else
			silent_ms += TICK_MS;
		if (answer == LOST || answer == REFUSED) {
			close(fd);
			fd = -1;
			poll(NULL, 0, TICK_MS);
		}
	}
	if (fd >= 0)
		close(fd);
	if (verdict == AGENT_SILENT && !waits && !job->unheard)
		handover_mark(config, job);
	return verdict;
}

void agent_report_end(uint32_t id, const struct config *config)
{
	char packet[MAX_PACKET];
	const char *node = getenv("SLURMD_NODENAME");
	int fd = send_packet(config->socket, packet, end_message(id, node ? node : "", packet, sizeof(packet)));

	if (fd >= 0)
		close(fd);
}

/* --- handover from the prolog to the tasks --- */

static uint32_t environment_number(const char *name)
{
	const char *text = getenv(name);

	return text ? (uint32_t)strtoul(text, NULL, 10) : 0;
}

/*
 * Returns the value of "share" in the one form in which job_submit.lua writes our key, at the comment's start; NULL for any
 * other comment. So the plugin, the script and the service always read the same.
 */
static const char *share_of(const char *comment)
{
	static const char form[] = "{\"cadenza\":{\"v\":1,\"share\":";

	return comment && !strncmp(comment, form, sizeof(form) - 1) ? comment + sizeof(form) - 1 : NULL;
}

enum sharing comment_sharing(const char *comment)
{
	const char *share = share_of(comment);

	if (share && (!strncmp(share, "true,", 5) || !strncmp(share, "true}", 5)))
		return SHARING_YES;
	if (share && (!strncmp(share, "false,", 6) || !strncmp(share, "false}", 6)))
		return SHARING_NO;
	return SHARING_UNSET;
}

/* The members before it are numbers and plain names, so the first brace ends our object. */
static bool comment_has(const char *comment, const char *form)
{
	const char *share = share_of(comment), *member = share ? strstr(share, form) : NULL;

	return member && member < share + strcspn(share, "}");
}

bool comment_batch_per_gpu(const char *comment)
{
	return comment_has(comment, ",\"batch\":\"per-gpu\"");
}

bool comment_late(const char *comment)
{
	return comment_has(comment, ",\"late\":true");
}

bool comment_graphs(const char *comment)
{
	return comment_has(comment, ",\"graphs\":true");
}

bool comment_summary(const char *comment)
{
	return comment_has(comment, ",\"summary\":true");
}

/* Does not make the socket's directory: a host without it has no agent. */
void handover_write(const struct config *config)
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
	/* slurmd runs this as root: a link here would have another file written. */
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd < 0)
		return;
	dprintf(fd, "%u %u %d %s %d %u %d %d %d\n", environment_number("SLURM_JOB_RESTART_COUNT"),
		environment_number("SLURM_JOB_NUM_NODES"), (int)comment_sharing(getenv("SLURM_JOB_COMMENT")), gpus,
		comment_batch_per_gpu(getenv("SLURM_JOB_COMMENT")), environment_number("SLURM_JOB_UID"),
		comment_late(getenv("SLURM_JOB_COMMENT")), comment_graphs(getenv("SLURM_JOB_COMMENT")),
		comment_summary(getenv("SLURM_JOB_COMMENT")));
	close(fd);
}

bool handover_read(const struct config *config, struct job *job, enum sharing *sharing)
{
	char path[512], gpus[512];
	uint32_t hosts, restart;
	int code, batch_per_gpu = 0, late = 0, graphs = 0, summary = 0, unheard = 0;
	FILE *file;
	bool read;

	path_of(config, job->node, job->id, path, sizeof(path));
	file = fopen(path, "re");
	if (!file)
		return false;
	read = fscanf(file, "%u %u %d %511s %d %*u %d %d %d %d", &restart, &hosts, &code, gpus, &batch_per_gpu, &late,
		      &graphs, &summary, &unheard) >= 4;
	fclose(file);
	if (!read)
		return false;
	job->hosts = hosts ? hosts : job->hosts;
	job->batch_per_gpu = batch_per_gpu;
	job->late = late;
	job->graphs = graphs;
	job->summary = summary;
	job->unheard = unheard;
	*sharing = (enum sharing)code;
	/* slurmd runs no prolog where a job is requeued as slurmctld starts: the GPUs are those of the start before. */
	if (restart < job->restart)
		return false;
	job->restart = restart;
	job->gpu_count = parse_gpus(gpus, job->gpus, MAX_GPUS);
	return true;
}

void handover_remove(const struct config *config)
{
	const char *node = getenv("SLURMD_NODENAME");
	char path[512];

	path_of(config, node ? node : "", environment_number("SLURM_JOB_ID"), path, sizeof(path));
	unlink(path);
}
