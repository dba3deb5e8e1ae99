// Holds back transfers of shard files, as a slow disk does, until a test releases them.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ebb/offload/io_queue.h"
#include "ebb/offload/shard_file.h"

namespace ebb::testing {

// A gate before the queues of a test. The gate outlives the queues, and opens before these are
// destroyed, because queues wait for transfers under way.
class Gate {
 public:
  // Whether a request is held back while the gate is closed. One at a time.
  using Holds = std::function<bool(const IoRequest&)>;
  explicit Gate(Holds holds) : holds_(std::move(holds)) {}

  int held_reads() const { return Held(false); }
  int held_writes() const { return Held(true); }
  // Opens it for good.
  void Open() {
    std::vector<std::pair<IoQueue*, IoRequest*>> held;
    {
      const std::lock_guard lock(mutex_);
      open_ = true;
      held = std::exchange(held_, {});
    }
    for (const auto& [queue, request] : held) queue->Submit({&request, 1});
  }

  using MakeQueue = ShardFile::Options::MakeQueue;
  using WrapQueue = decltype(ShardFile::Options::wrap_queue);
  // For ShardFile::Options::wrap_queue. `behind`: a wrapper between this and the system, if any.
  WrapQueue Before(WrapQueue behind = {}) {
    return [this, behind = std::move(behind)](
               IoListener& listener,
               const MakeQueue& make) -> absl::StatusOr<std::unique_ptr<IoQueue>> {
      auto inner = behind ? behind(listener, make) : make(listener);
      if (!inner.ok()) return inner.status();
      return std::make_unique<Queue>(*this, *std::move(inner));
    };
  }

 private:
  class Queue final : public IoQueue {
   public:
    Queue(Gate& gate, std::unique_ptr<IoQueue> inner) : gate_(gate), inner_(std::move(inner)) {}
    void Submit(std::span<IoRequest* const> requests) override {
      std::vector<IoRequest*> through;
      for (IoRequest* request : requests) {
        if (!gate_.Keeps(*inner_, *request)) through.push_back(request);
      }
      if (!through.empty()) inner_->Submit(through);
    }
    std::string description() const override { return inner_->description(); }

   private:
    Gate& gate_;
    const std::unique_ptr<IoQueue> inner_;
  };

  bool Keeps(IoQueue& queue, IoRequest& request) {
    const std::lock_guard lock(mutex_);
    if (open_ || !holds_(request)) return false;
    held_.emplace_back(&queue, &request);
    return true;
  }
  int Held(bool writes) const {
    const std::lock_guard lock(mutex_);
    int count = 0;
    for (const auto& [queue, request] : held_) count += request->write == writes ? 1 : 0;
    return count;
  }

  const Holds holds_;
  mutable std::mutex mutex_;
  bool open_ = false;
  std::vector<std::pair<IoQueue*, IoRequest*>> held_;
};

}  // namespace ebb::testing
