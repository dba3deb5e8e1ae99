#include "ebb/runtime/comm/launch/launch.h"

#include <unistd.h>

#include <initializer_list>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb {
namespace {

constexpr int kRanksMax = 1 << 20;

// How a kind of launcher numbers its processes.
struct Numbering {
  const char* launcher;
  const char* rank;
  const char* size;
};
constexpr Numbering kTorchrun = {"torchrun", "RANK", "WORLD_SIZE"};
constexpr Numbering kOpenMpi = {"Open MPI's mpirun", "OMPI_COMM_WORLD_RANK",
                                "OMPI_COMM_WORLD_SIZE"};
constexpr Numbering kPmi = {"an MPI launcher", "PMI_RANK", "PMI_SIZE"};
constexpr Numbering kSlurmStep = {"SLURM's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"};
constexpr Numbering kSlurm = {"SLURM's srun", "SLURM_PROCID", "SLURM_NTASKS"};

const std::string* Find(const Environment& environment, const char* name) {
  const auto found = environment.find(name);
  return found == environment.end() ? nullptr : &found->second;
}

std::string ValueOr(const Environment& environment, std::initializer_list<const char*> names,
                    std::string otherwise = "") {
  for (const char* name : names) {
    if (const std::string* value = Find(environment, name)) return *value;
  }
  return otherwise;
}

absl::StatusOr<int> Number(const Environment& environment, const char* name, int min, int max,
                           absl::string_view what) {
  const std::string& text = *Find(environment, name);
  int number = 0;
  if (!absl::SimpleAtoi(text, &number) || number < min || number > max) {
    return absl::InvalidArgumentError(absl::StrCat("the environment has ", name, "='", text,
                                                   "', but it must be a ", what, " from ", min,
                                                   " to ", max));
  }
  return number;
}

// One launcher's answer. Nothing: none of the launcher's variables is set.
absl::StatusOr<std::optional<Launch>> Read(const Environment& environment,
                                           const Numbering& numbering) {
  const bool has_rank = Find(environment, numbering.rank) != nullptr;
  const bool has_size = Find(environment, numbering.size) != nullptr;
  if (!has_rank && !has_size) return std::optional<Launch>();
  if (!has_rank || !has_size) {
    const char* const present = has_rank ? numbering.rank : numbering.size;
    const char* const absent = has_rank ? numbering.size : numbering.rank;
    return absl::InvalidArgumentError(absl::StrCat(
        "the environment has ", present, "=", *Find(environment, present), " but no ", absent, ": ",
        numbering.launcher, " sets both. Set ", absent, ", or unset ", present));
  }
  EBB_ASSIGN_OR_RETURN(const int size,
                       Number(environment, numbering.size, 1, kRanksMax, "number of ranks"));
  EBB_ASSIGN_OR_RETURN(const int rank, Number(environment, numbering.rank, 0, size - 1, "rank"));
  Launch launch;
  launch.launcher = numbering.launcher;
  launch.rank = rank;
  launch.size = size;
  return std::optional<Launch>(std::move(launch));
}

std::string SlurmJob(const Environment& environment) {
  return ValueOr(environment, {"SLURM_JOB_ID", "SLURM_JOBID"});
}
std::string SlurmStep(const Environment& environment) {
  return ValueOr(environment, {"SLURM_STEP_ID", "SLURM_STEPID"});
}

// srun has started this very process. A batch script or an interactive shell is one process,
// although it has the numbers of its allocation.
absl::StatusOr<std::optional<Launch>> ReadSlurm(const Environment& environment) {
  if (Find(environment, "SLURM_PROCID") == nullptr) return std::optional<Launch>();
  // SLURM_INTERACTIVE_STEP: the step of salloc's shell where LaunchParameters has
  // use_interactive_step.
  constexpr const char* kInteractiveStep = "4294967290";
  const std::string step = SlurmStep(environment);
  const bool is_batch_script = !SlurmJob(environment).empty() && step.empty();
  if (is_batch_script || step == kInteractiveStep) return std::optional<Launch>();
  const bool has_step = Find(environment, kSlurmStep.size) != nullptr;
  return Read(environment, has_step ? kSlurmStep : kSlurm);
}

absl::Status Disagreement(const Environment& environment, const Launch& a, const Launch& b,
                          const Numbering& of_a, const Numbering& of_b) {
  return absl::FailedPreconditionError(absl::StrCat(
      "two launchers disagree about this process: ", of_a.rank, "=", a.rank, " and ", of_a.size,
      "=", a.size, " (", a.launcher, "), but ", of_b.rank, "=", b.rank, " and ", of_b.size, "=",
      b.size, " (", b.launcher, "). Unset those that are left over",
      Find(environment, "SLURM_JOB_ID") != nullptr ? ", or start the ranks with only one" : ""));
}

bool Agree(const Launch& a, const Launch& b) {
  return a.rank == b.rank && a.size == b.size;
}

// RANK and WORLD_SIZE. A script may export one of them beside `other`, the numbers of a launcher.
// The variable must then be the launcher's, which says the rest.
absl::StatusOr<std::optional<Launch>> ReadTorchrun(const Environment& environment,
                                                   const Launch* other, const Numbering& of_other) {
  const bool is_half = (Find(environment, kTorchrun.rank) != nullptr) !=
                       (Find(environment, kTorchrun.size) != nullptr);
  if (!is_half || other == nullptr) return Read(environment, kTorchrun);
  const bool has_rank = Find(environment, kTorchrun.rank) != nullptr;
  const auto number = has_rank
                          ? Number(environment, kTorchrun.rank, 0, kRanksMax, "rank")
                          : Number(environment, kTorchrun.size, 1, kRanksMax, "number of ranks");
  EBB_RETURN_IF_ERROR(number.status());
  if (*number == (has_rank ? other->rank : other->size)) return std::optional<Launch>();
  const char* const half = has_rank ? kTorchrun.rank : kTorchrun.size;
  return absl::FailedPreconditionError(
      absl::StrCat("the environment has ", half, "=", *number, ", but ",
                   has_rank ? of_other.rank : of_other.size, "=",
                   has_rank ? other->rank : other->size, " (", other->launcher, "): unset ", half));
}

// Where Open MPI's MPI_Init finds the other processes: PMIx, or PMI if srun provides it
// (--mpi=pmi2). The PMI of other MPIs' launchers is not for Open MPI.
bool HasMpiServer(const Environment& environment, bool by_srun) {
  return Find(environment, "PMIX_NAMESPACE") != nullptr ||
         (by_srun &&
          (Find(environment, "PMI_FD") != nullptr || Find(environment, "PMI_PORT") != nullptr));
}

// FNV-1a, for ports: the same on every host.
uint32_t Hash(const std::string& text) {
  uint32_t hash = 2166136261u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

// Above the ports of services, below those that Linux gives to outgoing connections (from 32768
// on).
int PortOf(const std::string& job) {
  return 20'000 + static_cast<int>(Hash(job) % 12'000);
}

// MASTER_ADDR and MASTER_PORT; nothing if neither is set.
absl::StatusOr<std::optional<MeetingPlace>> Master(const Environment& environment) {
  const std::string* const host = Find(environment, "MASTER_ADDR");
  const std::string* const port = Find(environment, "MASTER_PORT");
  if (host == nullptr && port == nullptr) return std::optional<MeetingPlace>();
  if (host == nullptr || port == nullptr || host->empty()) {
    return absl::InvalidArgumentError(absl::StrCat("the environment has ",
                                                   host == nullptr || host->empty()
                                                       ? "MASTER_PORT but no MASTER_ADDR"
                                                       : "MASTER_ADDR but no MASTER_PORT",
                                                   ": the ranks meet at both"));
  }
  EBB_ASSIGN_OR_RETURN(const int number, Number(environment, "MASTER_PORT", 1, 65'535, "port"));
  return std::optional<MeetingPlace>({.host = *host, .port = number, .name = ""});
}

// `name`: of the variable with the number of ranks on this host.
absl::Status ReadLocalSize(const Environment& environment, const char* name, Launch& launch) {
  if (Find(environment, name) == nullptr) return absl::OkStatus();
  EBB_ASSIGN_OR_RETURN(const int here,
                       Number(environment, name, 1, launch.size, "number of ranks on this host"));
  launch.one_host = here == launch.size;
  return absl::OkStatus();
}

MeetingPlace Named(const std::string& job) {
  return {.host = "", .port = 0, .name = absl::StrCat("ebb-", getuid(), "-", job)};
}

bool IsLoopback(const std::string& host) {
  return host == "localhost" || host == "::1" || absl::StartsWith(host, "127.");
}

absl::Status PlaceTorchrun(const Environment& environment, Launch& launch) {
  // Started by hand, ranks of two jobs differ in nothing else. A SLURM step has a name of its own,
  // but a job may have one step a host.
  launch.job = ValueOr(environment, {"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_JOBID",
                                     "PBS_JOBID", "LSB_JOBID"});
  if (!launch.place.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the environment has RANK=", launch.rank, " and WORLD_SIZE=", launch.size,
                     " but no MASTER_ADDR and MASTER_PORT, where the ranks meet: set them to a "
                     "host name and a free port of rank 0's host"));
  }
  EBB_RETURN_IF_ERROR(ReadLocalSize(environment, "LOCAL_WORLD_SIZE", launch));
  // Several torchruns of one host may form a world. Torchruns of several hosts would not have met at
  // such an address.
  const std::string* const here = Find(environment, "LOCAL_WORLD_SIZE");
  if (here != nullptr && !launch.one_host && IsLoopback(launch.place->host) &&
      Find(environment, "TORCHELASTIC_RUN_ID") == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the environment has LOCAL_WORLD_SIZE=", *here, " and WORLD_SIZE=", launch.size,
        ", so there are several hosts, but MASTER_ADDR=", launch.place->host,
        " is each host itself: set MASTER_ADDR to the name or address of rank 0's host. If all "
        "ranks are on this host, set LOCAL_WORLD_SIZE=",
        launch.size));
  }
  // torchrun itself then listens at MASTER_PORT, for PyTorch's rendezvous.
  if (ValueOr(environment, {"TORCHELASTIC_USE_AGENT_STORE"}) == "True") {
    const std::string restart = ValueOr(environment, {"TORCHELASTIC_RESTART_COUNT"}, "0");
    if (launch.one_host) {
      launch.place = Named(absl::StrCat("torchrun-", launch.job, "-", launch.place->host, "-",
                                        launch.place->port, "-", restart));
    } else {
      launch.place->port = PortOf(absl::StrCat(launch.job, " ", launch.place->port));
    }
  }
  return absl::OkStatus();
}

absl::Status PlaceMpi(const Environment& environment, Launch& launch) {
  const bool is_open_mpi = Find(environment, kOpenMpi.rank) != nullptr;
  launch.job = is_open_mpi ? ValueOr(environment, {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"})
                           : ValueOr(environment, {"PMI_JOBID"});
  EBB_RETURN_IF_ERROR(ReadLocalSize(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", launch));
  if (launch.place.has_value()) return absl::OkStatus();
  if (!is_open_mpi) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the environment has PMI_RANK=", launch.rank, " and PMI_SIZE=", launch.size,
        " but no MASTER_ADDR and MASTER_PORT, where the ranks of this launcher meet: set them to a "
        "host name and a free port of rank 0's host"));
  }
  if (launch.one_host && !launch.job.empty())
    launch.place = Named(absl::StrCat("mpirun-", launch.job));
  return absl::OkStatus();
}

absl::Status PlaceSlurm(const Environment& environment, Launch& launch) {
  const std::string job = SlurmJob(environment), step = SlurmStep(environment);
  launch.job = absl::StrCat(job.empty() ? "none" : job, ".", step.empty() ? "0" : step);
  launch.one_host = ValueOr(environment, {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}) == "1";
  if (launch.place.has_value()) return absl::OkStatus();
  if (launch.one_host && !job.empty() && !step.empty()) {
    launch.place = Named(absl::StrCat("slurm-", launch.job));
    return absl::OkStatus();
  }
  const std::string nodes =
      ValueOr(environment, {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
  if (nodes.empty()) {
    return absl::InvalidArgumentError(
        "the environment has SLURM_PROCID but no SLURM_STEP_NODELIST: set MASTER_ADDR and "
        "MASTER_PORT to the host of rank 0 and a free port of it");
  }
  EBB_ASSIGN_OR_RETURN(std::string host, FirstHost(nodes));
  launch.place = MeetingPlace{.host = std::move(host), .port = PortOf(launch.job), .name = ""};
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::optional<Launch>> DescribeLaunch(const Environment& environment) {
  EBB_ASSIGN_OR_RETURN(std::optional<Launch> mpi, Read(environment, kOpenMpi));
  const bool is_open_mpi = mpi.has_value();
  if (!is_open_mpi) {
    EBB_ASSIGN_OR_RETURN(mpi, Read(environment, kPmi));
  }
  EBB_ASSIGN_OR_RETURN(std::optional<Launch> slurm, ReadSlurm(environment));
  // srun --mpi=pmi2 sets PMI's variables beside its own, and its own say more.
  if (mpi.has_value() && !is_open_mpi && slurm.has_value() && Agree(*mpi, *slurm)) mpi.reset();
  EBB_ASSIGN_OR_RETURN(std::optional<Launch> torchrun, ReadTorchrun(environment,
                                                                    mpi.has_value()     ? &*mpi
                                                                    : slurm.has_value() ? &*slurm
                                                                                        : nullptr,
                                                                    is_open_mpi       ? kOpenMpi
                                                                    : mpi.has_value() ? kPmi
                                                                                      : kSlurm));
  const bool is_torchrun = Find(environment, "TORCHELASTIC_RUN_ID") != nullptr;
  if (torchrun.has_value() && !is_torchrun)
    torchrun->launcher = "a shell or a launcher like torchrun";

  if (torchrun.has_value() && mpi.has_value() && !Agree(*torchrun, *mpi)) {
    return Disagreement(environment, *torchrun, *mpi, kTorchrun, is_open_mpi ? kOpenMpi : kPmi);
  }
  // srun starts torchrun and mpirun's daemons as its processes, which then have numbers of their
  // own. RANK and WORLD_SIZE set by hand must equal srun's.
  if (torchrun.has_value() && !is_torchrun && slurm.has_value() && !Agree(*torchrun, *slurm)) {
    return Disagreement(environment, *torchrun, *slurm, kTorchrun, kSlurm);
  }
  std::optional<Launch> launch = torchrun.has_value() ? torchrun : mpi.has_value() ? mpi : slurm;
  if (!launch.has_value() || launch->size == 1) return launch;
  // torchrun's processes, and those of other MPIs' launchers, inherit the variables of the launcher
  // that has started theirs.
  const bool is_other_mpi = mpi.has_value() && !is_open_mpi;
  launch->has_mpi = !is_torchrun && !is_other_mpi &&
                    HasMpiServer(environment, slurm.has_value() && !torchrun.has_value());
  launch->launcher_outlives_ranks = torchrun.has_value() ? is_torchrun : is_open_mpi;
  EBB_ASSIGN_OR_RETURN(launch->place, Master(environment));
  EBB_RETURN_IF_ERROR(torchrun.has_value() ? PlaceTorchrun(environment, *launch)
                      : mpi.has_value()    ? PlaceMpi(environment, *launch)
                                           : PlaceSlurm(environment, *launch));
  return launch;
}

bool IsFirstOfHost(const Environment& environment) {
  return ValueOr(environment, {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"}) ==
         "0";
}

Environment ThisEnvironment() {
  Environment environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string::npos) environment[text.substr(0, equals)] = text.substr(equals + 1);
  }
  return environment;
}

absl::StatusOr<std::string> FirstHost(const std::string& node_list) {
  const size_t end = node_list.find_first_of(",[");
  std::string host = node_list.substr(0, end);
  if (end != std::string::npos && node_list[end] == '[') {
    const size_t close = node_list.find(']', end);
    const size_t number_end = node_list.find_first_of("-,]", end);
    if (close == std::string::npos || number_end == end + 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("SLURM's list of hosts '", node_list, "' cannot be read"));
    }
    host += node_list.substr(end + 1, number_end - end - 1);
    // The text after the brackets belongs to the name, up to the next name; it may have brackets,
    // too.
    const std::string rest = node_list.substr(close + 1);
    if (!rest.empty() && rest[0] != ',') {
      absl::StatusOr<std::string> tail = FirstHost(rest);
      if (!tail.ok()) return tail;
      host += *tail;
    }
  }
  if (host.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("SLURM's list of hosts '", node_list, "' cannot be read"));
  }
  return host;
}

}  // namespace ebb
