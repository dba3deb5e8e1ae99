// The kernels of gpt on the host, from the device's own sources. A launch runs its blocks when the
// stream comes to it.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>

#include "block.h"
#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "gpt_touched.h"
#include "graph.h"
#include "host_matrix_thread.h"
#include "order.h"
#include "state.h"

namespace ebb::kernel {
namespace {

// Without namespaces and template arguments, because tests name kernels that fail.
template <class Kernel>
const std::string& NameOf() {
  static const std::string name = [](std::string_view full) {
    full.remove_prefix(full.find("Kernel = ") + 9);
    full = full.substr(0, full.find_first_of("<;]"));
    return std::string(full.substr(full.rfind(':') + 1));
  }(__PRETTY_FUNCTION__);
  return name;
}

// Whether the kernel is on the device already, so that a first launch does not load it in the
// middle of a step.
template <class Kernel>
std::atomic<bool> loaded{false};

template <class Kernel>
struct Launched {
  Grid grid;
  typename Kernel::Arrays arrays;

  static void Run(void* argument) {
    const auto* const launched = static_cast<const Launched*>(argument);
    stand_in::RunKernel<Kernel>(launched->grid.blocks, launched->grid.shared_bytes,
                                launched->arrays);
  }
};

}  // namespace

template <class Kernel>
cudaError_t LaunchKernel(cudaStream_t stream, const Grid& grid,
                         const typename Kernel::Arrays& arrays) {
  if (grid.blocks == 0) return cudaSuccess;
  if (!loaded<Kernel>) {
    std::fprintf(stderr, "stand-in for CUDA: %s was not loaded before its launch\n",
                 NameOf<Kernel>().c_str());
    std::abort();
  }
  if (stand_in::Lost() != cudaSuccess) return stand_in::Lost();
  if (const auto spoilt = stand_in::CaptureState(stream)) return spoilt;
  if (const int code = stand_in::Injected(NameOf<Kernel>().c_str()))
    return static_cast<cudaError_t>(code);
  if (stand_in::WatchesOrder()) {
    stand_in::NoteKernel(stream, NameOf<Kernel>().c_str(),
                         gpt::cuda::TouchedBy(std::type_identity<Kernel>(), arrays));
  }
  // Without new, because tests check that operations allocate nothing. CUDA's own memory does not
  // count there.
  static_assert(std::is_trivially_copyable_v<Launched<Kernel>>);
  void* const parameters = std::malloc(sizeof(Launched<Kernel>));
  if (parameters == nullptr) return cudaErrorMemoryAllocation;
  stand_in::EnqueueKernel(stream, &Launched<Kernel>::Run,
                          new (parameters) Launched<Kernel>{grid, arrays}, &std::free);
  return cudaSuccess;
}

template <class... Kernels>
cudaError_t LoadKernels() {
  if (stand_in::Lost() != cudaSuccess) return stand_in::Lost();
  if (const int code = stand_in::Injected("LoadKernels")) return static_cast<cudaError_t>(code);
  ((loaded<Kernels> = true), ...);
  return cudaSuccess;
}

}  // namespace ebb::kernel
