#include "ebb/runtime/comm/rendezvous/hosts.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ebb {

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
        absl::StrAppend(out, participants[static_cast<size_t>(ranks[0])].host_name);
      });
  return absl::StrCat(hosts.count(), hosts.count() == 1 ? " host (" : " hosts (", names, ")");
}

bool ShareMemory(const std::vector<Participant>& participants) {
  return std::all_of(participants.begin(), participants.end(), [&](const Participant& other) {
    return other.shared_memory == participants[0].shared_memory;
  });
}

absl::Status CpuRanksNeedMpi(const std::vector<Participant>& participants) {
  return absl::UnimplementedError(absl::StrCat(
      "the ranks are on ", DescribeHosts(participants),
      ": CPU ranks on several hosts need MPI. Start them with mpirun or srun --mpi=pmix, or start "
      "all ranks on one host"));
}

}  // namespace ebb
