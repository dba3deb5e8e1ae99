// What ranks send each other about themselves when they meet.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace ebb {

struct Participant {
  std::string launcher;  // and job: the same on all ranks
  std::string build;     // of Ebb: the same on all ranks
  int rank = 0;
  int size = 0;
  std::string host_name;
  // Equal on ranks that can share memory: the running kernel, and the file system behind /dev/shm.
  std::string shared_memory;
  std::string pid_namespace;  // and kernel, in which the process id is unique
  int64_t pid = 0;
  std::string cores;  // on which the process may run, as bits
};

// This process.
Participant Myself(int rank, int size, std::string launcher);

// "rank 1 (process 4242 on host 'node1')", or "rank 1" of a thread.
std::string Describe(const Participant& participant);

// Begins with the launcher and the build in every version of the protocol, so that a rank of
// another version is recognised.
std::string Pack(const Participant& participant);
absl::StatusOr<Participant> UnpackParticipant(std::string_view payload);

}  // namespace ebb
