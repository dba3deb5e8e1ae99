// The facts that ranks send each other when they meet. A pure function, the same on all ranks,
// finds which of them share a host, and whether the hosts are alike.
//
//   host 0   | 0 | 1 | 2 |        even: every host has as many ranks, numbered host by host
//   host 1   | 3 | 4 | 5 |
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebb {

struct Participant {
  std::string launcher;  // and job, if it has a name: the same on all ranks
  std::string build;     // of Ebb: the same on all ranks
  int rank = 0;
  int size = 0;
  std::string host_name;
  // Equal on ranks that can share memory: the running kernel, and the file system behind /dev/shm.
  std::string shared_memory;
  std::string pid_namespace;  // and kernel, in which the process id is unique
  int64_t pid = 0;
  std::string cores;             // on which the process may run, as bits
  std::string without_mpi = {};  // why the process cannot use MPI; empty: it can
};

// This process.
Participant Myself(int rank, int size, std::string launcher);

// "rank 1 (process 4242 on host 'node1')", or "rank 1" of a thread.
std::string Describe(const Participant& participant);

// "rank 1 on host 'node1'", and the same for several (NameAndHost).
std::string NameAndHostOf(const Participant& participant);
std::string NamesAndHosts(const std::vector<Participant>& participants, std::span<const int> ranks);

// "torchrun, job r1": Participant::launcher. `job`: empty if it has no name.
std::string LauncherText(std::string_view launcher, std::string_view job);
// Whether two such texts may be of one job. A rank that was started by hand may not know the name.
bool MayBeOfOneJob(std::string_view launcher, std::string_view other);

// Begins with the launcher and the build in every version of the protocol, so that a rank of
// another version is recognised.
std::string Pack(const Participant& participant);
absl::StatusOr<Participant> UnpackParticipant(std::string_view payload);

struct Hosts {
  // By host in the order of the hosts' first ranks, then by rank.
  std::vector<std::vector<int>> ranks;
  bool is_even = false;

  int count() const { return static_cast<int>(ranks.size()); }
  // For even hosts.
  int ranks_per_host() const { return static_cast<int>(ranks[0].size()); }
  // The ranks that share a host with `rank`.
  const std::vector<int>& With(int rank) const;
};

// By host name.
Hosts FindHosts(const std::vector<Participant>& participants);
// "2 hosts (node1, node2)".
std::string DescribeHosts(const std::vector<Participant>& participants);

bool ShareMemory(const std::vector<Participant>& participants);

// "Open MPI is missing on host 'b' (rank 2, rank 3): ...", with the reason of the first host that
// lacks it; empty if none does.
std::string HostsWithoutMpi(const std::vector<Participant>& participants);

// kUnimplemented; names the hosts, and those that lack MPI.
absl::Status CpuRanksNeedMpi(const std::vector<Participant>& participants);

}  // namespace ebb
