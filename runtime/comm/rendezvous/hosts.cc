#include "ebb/runtime/comm/rendezvous/hosts.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/comm/packer.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/shared/layout.h"
#include "ebb/runtime/device/machine.h"

namespace ebb {
namespace {

std::string PidNamespace() {
  struct stat info = {};
  return stat("/proc/self/ns/pid", &info) == 0 ? absl::StrCat(info.st_dev, ":", info.st_ino)
                                               : "unknown";
}

std::string SharedMemory() {
  struct stat info = {};
  return stat("/dev/shm", &info) == 0 ? absl::StrCat(info.st_dev) : "none";
}

constexpr std::string_view kJob = ", job ";  // between a launcher's name and its job's

std::string Cores() {
  cpu_set_t allowed;
  std::string bits;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return bits;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    bits.push_back(CPU_ISSET(core, &allowed) ? '1' : '0');
  bits.erase(bits.find_last_of('1') + 1);
  return bits;
}

// FNV-1a of all offsets in shared memory.
constexpr uint64_t LayoutNumber() {
  const uint64_t numbers[] = {sizeof(void*),
                              sizeof(shared::WorldHeader),
                              sizeof(shared::RankPlace),
                              sizeof(shared::GroupHeader),
                              sizeof(shared::RankRecord),
                              sizeof(SharedStatus),
                              sizeof(shared::Point),
                              sizeof(CallSummary),
                              shared::kSlots,
                              shared::kSlotBytes,
                              shared::kWaitPoints};
  uint64_t hash = 14695981039346656037u;
  for (const uint64_t number : numbers) hash = (hash ^ number) * 1099511628211u;
  return hash;
}

// "Ebb 0.1.0 (shared memory 5a0f...)": the version, and a number that differs if the structures
// that ranks share differ in size.
std::string ThisBuild() {
  return absl::StrCat("Ebb ", EBB_VERSION, " (shared memory ", absl::Hex(LayoutNumber()), ")");
}

}  // namespace

Participant Myself(int rank, int size, std::string launcher) {
  const std::string kernel = BootId();
  return {.launcher = std::move(launcher),
          .build = ThisBuild(),
          .rank = rank,
          .size = size,
          .host_name = HostName(),
          .shared_memory = absl::StrCat(kernel, " ", SharedMemory()),
          .pid_namespace = absl::StrCat(kernel, " ", PidNamespace()),
          .pid = getpid(),
          .cores = Cores()};
}

std::string Describe(const Participant& participant) {
  if (participant.host_name.empty()) return absl::StrCat("rank ", participant.rank);
  return absl::StrCat("rank ", participant.rank, " (process ", participant.pid, " on host '",
                      participant.host_name, "')");
}

std::string NamesAndHosts(const std::vector<Participant>& participants,
                          std::span<const int> ranks) {
  std::vector<NameAndHost> all;
  for (const int rank : ranks)
    all.push_back({absl::StrCat("rank ", rank), participants[rank].host_name});
  return NamesAndHosts(std::span<const NameAndHost>(all));
}

std::string NameAndHostOf(const Participant& participant) {
  const NameAndHost one = {absl::StrCat("rank ", participant.rank), participant.host_name};
  return NamesAndHosts(std::span<const NameAndHost>(&one, 1));
}

std::string LauncherText(std::string_view launcher, std::string_view job) {
  std::string text(launcher);
  if (!job.empty()) text.append(kJob).append(job);
  return text;
}

bool MayBeOfOneJob(std::string_view launcher, std::string_view other) {
  if (launcher.size() > other.size()) std::swap(launcher, other);
  if (!other.starts_with(launcher)) return false;
  return launcher.size() == other.size() || other.substr(launcher.size()).starts_with(kJob);
}

std::string Pack(const Participant& p) {
  return Packer()
      .Add(p.launcher, p.build, p.rank, p.size, p.host_name, p.shared_memory, p.pid_namespace,
           p.pid, p.cores, p.without_mpi)
      .Take();
}

absl::StatusOr<Participant> UnpackParticipant(std::string_view payload) {
  Participant p;
  if (!Unpacker(payload).Read(p.launcher, p.build, p.rank, p.size, p.host_name, p.shared_memory,
                              p.pid_namespace, p.pid, p.cores, p.without_mpi))
    return absl::DataLossError("an introduction that cannot be read");
  return p;
}

const std::vector<int>& Hosts::With(int rank) const {
  return *std::find_if(ranks.begin(), ranks.end(), [&](const std::vector<int>& here) {
    return std::find(here.begin(), here.end(), rank) != here.end();
  });
}

Hosts FindHosts(const std::vector<Participant>& participants) {
  Hosts hosts;
  std::vector<std::string> names;
  for (size_t rank = 0; rank < participants.size(); ++rank) {
    const auto found = std::find(names.begin(), names.end(), participants[rank].host_name);
    const auto index = static_cast<size_t>(found - names.begin());
    if (found == names.end()) {
      names.push_back(participants[rank].host_name);
      hosts.ranks.emplace_back();
    }
    hosts.ranks[index].push_back(static_cast<int>(rank));
  }
  int next = 0;
  hosts.is_even = true;
  for (const std::vector<int>& ranks : hosts.ranks) {
    hosts.is_even = hosts.is_even && ranks.size() == hosts.ranks[0].size();
    for (const int rank : ranks) hosts.is_even = hosts.is_even && rank == next++;
  }
  return hosts;
}

std::string DescribeHosts(const std::vector<Participant>& participants) {
  const Hosts hosts = FindHosts(participants);
  const std::string names =
      absl::StrJoin(hosts.ranks, ", ", [&](std::string* out, const std::vector<int>& ranks) {
        absl::StrAppend(out, participants[ranks[0]].host_name);
      });
  return absl::StrCat(hosts.count(), hosts.count() == 1 ? " host (" : " hosts (", names, ")");
}

bool ShareMemory(const std::vector<Participant>& participants) {
  return std::all_of(participants.begin(), participants.end(), [&](const Participant& other) {
    return other.shared_memory == participants[0].shared_memory;
  });
}

std::string HostsWithoutMpi(const std::vector<Participant>& participants) {
  std::string hosts, why;
  for (const std::vector<int>& ranks : FindHosts(participants).ranks) {
    std::vector<int> lacking;
    for (const int rank : ranks) {
      const std::string& reason = participants[rank].without_mpi;
      if (reason.empty()) continue;
      lacking.push_back(rank);
      if (why.empty()) why = reason;
    }
    if (lacking.empty()) continue;
    absl::StrAppend(&hosts, hosts.empty() ? "" : ", ", "host '", participants[ranks[0]].host_name,
                    "' (", RankNames(lacking), ")");
  }
  return hosts.empty() ? "" : absl::StrCat("Open MPI is missing on ", hosts, ": ", why);
}

absl::Status CpuRanksNeedMpi(const std::vector<Participant>& participants) {
  const std::string missing = HostsWithoutMpi(participants);
  return absl::UnimplementedError(absl::StrCat(
      "the ranks are on ", DescribeHosts(participants), ": CPU ranks on several hosts need MPI. ",
      missing.empty() ? "Start them with Open MPI's mpirun or srun --mpi=pmix, or start all ranks "
                        "on one host"
                      : missing));
}

}  // namespace ebb
