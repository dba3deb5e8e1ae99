#include "block.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace ebb::stand_in {
namespace {

constexpr size_t kStackBytes = size_t{128} << 10;

// The stacks of a host thread's blocks, which are reused: new ones cost more than most kernels.
char* StackOf(size_t thread) {
  thread_local std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() <= thread)
    stacks.push_back(std::make_unique_for_overwrite<char[]>(kStackBytes));
  return stacks[thread].get();
}

constexpr size_t kExchangeBytesMax = 64;  // of a lane

// One of several contexts of a host thread, with what sanitizers must know of a switch.
class Context {
 public:
  ucontext_t native = {};

  void SwitchTo(Context& other, [[maybe_unused]] bool ends = false) {
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(ends ? nullptr : &fake_stack, other.stack, other.stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(other.tsan, 0);
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    swapcontext(&native, &other.native);
#else
    // Once both have been entered, without the system calls of swapcontext.
    entered_ = true;
    if (_setjmp(place_) == 0) {
      if (other.entered_) _longjmp(other.place_, 1);
      setcontext(&other.native);
    }
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }
  // Called first in a context that was never switched from.
  static void Entered([[maybe_unused]] Context& from) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &from.stack, &from.stack_bytes);
#endif
  }

  const void* stack = nullptr;
  size_t stack_bytes = 0;
#if defined(__SANITIZE_THREAD__)
  void* tsan = nullptr;
#endif

 private:
  [[maybe_unused]] jmp_buf place_;
  [[maybe_unused]] bool entered_ = false;
};

}  // namespace

class Block {
 public:
  Block(int64_t index, int64_t count, int threads, size_t shared_bytes,
        const std::function<void(HostThread&)>& body)
      : index_(index),
        count_(count),
        body_(body),
        shared_(shared_bytes + kSharedAlignment),
        warps_(static_cast<size_t>(threads) / kernel::kWarp),
        fibers_(static_cast<size_t>(threads)) {
    std::memset(shared_.data(), 0xff, shared_.size());
  }

  void Run() {
#if defined(__SANITIZE_THREAD__)
    caller_.tsan = __tsan_get_current_fiber();
#endif
    for (size_t i = 0; i < fibers_.size(); ++i) Start(i);
    size_t left = fibers_.size();
    std::minstd_rand random(static_cast<unsigned>(index_ + 1));
    std::vector<size_t> order(fibers_.size());
    std::iota(order.begin(), order.end(), 0);
    while (left > 0) {
      const size_t before = turns_;
      std::shuffle(order.begin(), order.end(), random);
      for (const size_t i : order) {
        Fiber& fiber = fibers_[i];
        if (fiber.done || (fiber.waits_for != nullptr && *fiber.waits_for == fiber.generation))
          continue;
        fiber.waits_for = nullptr;
        current_ = &fiber;
        ++turns_;
        caller_.SwitchTo(fiber.context);
        if (fiber.done) --left;
      }
      if (turns_ == before) {
        std::fprintf(stderr, "%zu threads of block %lld wait for others that never come\n", left,
                     static_cast<long long>(index_));
        std::abort();
      }
    }
#if defined(__SANITIZE_THREAD__)
    for (Fiber& fiber : fibers_) __tsan_destroy_fiber(fiber.context.tsan);
#endif
  }

  int64_t index() const {
    return index_;
  }
  int64_t count() const {
    return count_;
  }
  char* shared() {
    const auto address = reinterpret_cast<uintptr_t>(shared_.data());
    return shared_.data() + (kSharedAlignment - address % kSharedAlignment) % kSharedAlignment;
  }

  void Sync() {
    Wait(all_, fibers_.size());
  }
  const char* Exchange(int thread, const void* mine, size_t bytes) {
    Warp& warp = warps_[static_cast<size_t>(thread) / kernel::kWarp];
    const size_t lane = static_cast<size_t>(thread) % kernel::kWarp;
    char* const exchanged = warp.exchanged[warp.barrier.generation % 2].data();
    if (bytes > kExchangeBytesMax) std::abort();
    if (bytes > 0) std::memcpy(exchanged + lane * bytes, mine, bytes);
    Wait(warp.barrier, kernel::kWarp);
    return exchanged;
  }

 private:
  static constexpr size_t kSharedAlignment = 128;
  struct Barrier {
    size_t generation = 0, arrived = 0;
  };
  struct Warp {
    Barrier barrier;
    std::array<std::array<char, kernel::kWarp * kExchangeBytesMax>, 2> exchanged;
  };
  struct Fiber {
    Context context;
    const size_t* waits_for = nullptr;  // null, or it goes on when this differs from `generation`
    size_t generation = 0;
    bool done = false;
  };

  void Wait(Barrier& barrier, size_t threads) {
    const size_t generation = barrier.generation;
    if (++barrier.arrived == threads) {
      barrier.arrived = 0;
      ++barrier.generation;
      return;
    }
    Fiber& fiber = *current_;
    fiber.waits_for = &barrier.generation;
    fiber.generation = generation;
    fiber.context.SwitchTo(caller_);
  }

  void Start(size_t i) {
    Fiber& fiber = fibers_[i];
    char* const stack = StackOf(i);
    fiber.context.stack = stack;
    fiber.context.stack_bytes = kStackBytes;
#if defined(__SANITIZE_THREAD__)
    fiber.context.tsan = __tsan_create_fiber(0);
#endif
    getcontext(&fiber.context.native);
    fiber.context.native.uc_stack.ss_sp = stack;
    fiber.context.native.uc_stack.ss_size = kStackBytes;
    // makecontext passes ints, so the pointer is passed in halves.
    const auto self = reinterpret_cast<uintptr_t>(this);
    makecontext(&fiber.context.native, reinterpret_cast<void (*)()>(&Block::Enter), 3,
                static_cast<unsigned>(self >> 32), static_cast<unsigned>(self),
                static_cast<unsigned>(i));
  }

  static void Enter(unsigned high, unsigned low, unsigned i) {
    auto& block = *reinterpret_cast<Block*>(uintptr_t{high} << 32 | low);
    Context::Entered(block.caller_);
    Fiber& fiber = block.fibers_[i];
    HostThread thread(block, static_cast<int>(i));
    block.body_(thread);
    fiber.done = true;
    fiber.context.SwitchTo(block.caller_, /*ends=*/true);
  }

  const int64_t index_, count_;
  const std::function<void(HostThread&)>& body_;
  std::vector<char> shared_;
  Barrier all_;
  std::vector<Warp> warps_;
  std::vector<Fiber> fibers_;
  Context caller_;
  Fiber* current_ = nullptr;
  size_t turns_ = 0;
};

int64_t HostThread::block() const {
  return block_.index();
}
int64_t HostThread::blocks() const {
  return block_.count();
}
char* HostThread::shared() const {
  return block_.shared();
}
void HostThread::Sync() {
  block_.Sync();
}
const char* HostThread::Exchange(const void* mine, size_t bytes) {
  return block_.Exchange(index_, mine, bytes);
}

void RunBlock(int64_t index, int64_t blocks, int threads, size_t shared_bytes,
              const std::function<void(HostThread&)>& body) {
  Block(index, blocks, threads, shared_bytes, body).Run();
}
void RunBlocks(int64_t blocks, int threads, size_t shared_bytes,
               const std::function<void(HostThread&)>& body) {
  for (int64_t b = 0; b < blocks; ++b) RunBlock(b, blocks, threads, shared_bytes, body);
}

}  // namespace ebb::stand_in
