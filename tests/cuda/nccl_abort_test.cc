// A failure that a host function notices ends the wait of all ranks, even if the system grants no
// thread any more. On the stand-in.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <cerrno>

#include "absl/strings/match.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/device.h"
#include "stand_in.h"
#include "tests/status.h"
#include "thread_ranks.h"

namespace {

thread_local bool threads_are_refused = false;

}  // namespace

// Replaces the C library's function in the whole program.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*run)(void*), void* argument) {
  if (threads_are_refused) return EAGAIN;
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return create(thread, attributes, run, argument);
}

namespace ebb::nccl_abort_test {
namespace {

// The engine notices a broken communicator in a host function, which may make no call of CUDA.
TEST(NcclAbortTest, AnAbortInAHostFunctionRunsOnAnExistingThread) {
  std::array<absl::Status, 2> seen;
  testing::ExpectOk(testing::RunOnGpus(2, 2, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda(world.rank()));
    EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("comm"));
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    if (world.rank() == 0) {
      stream.Enqueue([&communicator] {
        threads_are_refused = true;
        communicator.Abort(absl::InternalError("seen on the stream"));
        threads_are_refused = false;
      });
    } else {
      EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
    }
    stream.WaitIdle();
    seen[static_cast<size_t>(world.rank())] = communicator.status();
    return absl::OkStatus();
  }));
  for (const absl::Status& of_rank : seen)
    EXPECT_TRUE(absl::StrContains(of_rank.message(), "seen on the stream")) << of_rank;
  EXPECT_EQ(stand_in::Alive(), stand_in::Live{});
  stand_in::Reset();
}

}  // namespace
}  // namespace ebb::nccl_abort_test
