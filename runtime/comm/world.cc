#include "ebb/runtime/comm/world.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/local/world.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

// How a launcher tells a process the size of its world.
struct Launcher {
  const char* name;
  const char* size;
  const char* rank;  // what must be set beside it, if anything
};
constexpr Launcher kLaunchers[] = {
    {"Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", nullptr},
    {"an MPI launcher", "PMI_SIZE", nullptr},
    {"torchrun", "WORLD_SIZE", nullptr},
    // An interactive allocation has the size too, and has launched nothing.
    {"SLURM's srun", "SLURM_NTASKS", "SLURM_PROCID"},
};

}  // namespace

absl::StatusOr<World> World::FromEnvironment() {
  for (const Launcher& launcher : kLaunchers) {
    const char* size_text = std::getenv(launcher.size);
    if (size_text == nullptr) continue;
    if (launcher.rank != nullptr && std::getenv(launcher.rank) == nullptr) continue;
    int size = 0;
    if (!absl::SimpleAtoi(size_text, &size) || size < 1) {
      return absl::InvalidArgumentError(absl::StrCat("the environment has ", launcher.size, "=",
                                                     size_text, ", which is no number of ranks"));
    }
    if (size == 1) continue;
    return absl::UnimplementedError(absl::StrCat(
        "this process is one of ", size, " that ", launcher.name, " has launched (", launcher.size,
        "=", size,
        "), but ranks are threads of one process here: start one process and ask it for ", size,
        " ranks (RunThreads)"));
  }
  return Single();
}

World World::Single() {
  return World(std::make_shared<LocalRank>(std::make_shared<LocalWorld>(1), 0));
}

absl::StatusOr<Communicator> World::NewCommunicator(const CommunicatorOptions& options) const {
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<CommunicatorBackend> backend,
                       backend_->NewCommunicator(options));
  return Communicator(std::move(backend));
}

}  // namespace ebb
