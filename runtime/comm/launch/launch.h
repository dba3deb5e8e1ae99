// The launcher's answer about the world of this process. A pure function of the environment, so
// that every rule has a line in a table of tests.
//
//   torchrun and its like   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; LOCAL_WORLD_SIZE
//   Open MPI                OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_SIZE; PMIX_NAMESPACE
//   other MPIs              PMI_RANK, PMI_SIZE, MASTER_ADDR, MASTER_PORT
//   SLURM                   SLURM_PROCID, SLURM_NTASKS of a step; SLURM_STEP_NODELIST; also with
//                           PMI's variables, which agree (srun --mpi=pmi2)
//
// RANK and WORLD_SIZE come first, then MPI, then SLURM, because SLURM may have started the other
// launchers. One of RANK and WORLD_SIZE alone is no launch where MPI or SLURM says the same number.
// MASTER_ADDR and MASTER_PORT say where to meet, whatever the launcher.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/rendezvous/meeting_place.h"

namespace ebb {

struct Launch {
  std::string launcher;  // "torchrun"
  std::string job;       // distinguishes this launch from others; empty: it has no such name
  int rank = 0;
  int size = 1;
  bool one_host = false;  // as far as is known
  bool has_mpi = false;   // Open MPI's MPI_Init would find all ranks
  // The launcher is the parent process and stays until all ranks have ended. If it ends earlier, it
  // was killed. False for a process that a shell or a script started with variables set by hand.
  bool launcher_outlives_ranks = false;
  // No place if ranks of several hosts have no way to meet without MPI.
  std::optional<MeetingPlace> place;
};

using Environment = std::map<std::string, std::string>;

// Nothing: no launcher has started this process. kInvalidArgument names the variable that is wrong
// or missing. kFailedPrecondition names the launchers that disagree.
absl::StatusOr<std::optional<Launch>> DescribeLaunch(const Environment& environment);

// Whether an MPI launcher or SLURM has said that this process is the first of its host. False if
// neither has said so.
bool IsFirstOfHost(const Environment& environment);

// The variables of this process.
Environment ThisEnvironment();

// The first host of SLURM's short form: "node[03-05,9],login" gives "node03".
absl::StatusOr<std::string> FirstHost(const std::string& node_list);

}  // namespace ebb
