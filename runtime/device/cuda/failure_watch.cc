#include "ebb/runtime/device/cuda/failure_watch.h"

#include <pthread.h>

#include <system_error>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/device/cuda/context.h"
#include "ebb/runtime/device/thread_limit.h"

namespace ebb {

FailureWatch::~FailureWatch() {
  if (!thread_.joinable()) return;
  stop_.store(true, std::memory_order_release);
  changed_.Notify();
  thread_.join();
}

absl::Status FailureWatch::Add(cudaStream_t crossing, const std::string& name) {
  const std::scoped_lock lock(mutex_);
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { Run(); });
    } catch (const std::system_error& error) {
      return NoThread(absl::StrCat("cannot start the thread that watches ", context_.name()),
                      error);
    }
  }
  crossings_.emplace(crossing, name);
  return absl::OkStatus();
}

void FailureWatch::Remove(cudaStream_t crossing) {
  const std::scoped_lock lock(mutex_);
  crossings_.erase(crossing);
}

void FailureWatch::Look() {
  looks_.fetch_add(1, std::memory_order_release);
  changed_.Notify();
}

void FailureWatch::Run() {
  pthread_setname_np(pthread_self(), "ebb cuda watch");
  const CudaCurrent current(context_.ordinal());
  // The watch's calls of CUDA do no harm while another thread captures a graph.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const auto stopped = [this] { return stop_.load(std::memory_order_acquire); };
  int64_t seen = 0;
  while (!stopped()) {
    changed_.Await([&] { return stopped() || looks_.load(std::memory_order_acquire) != seen; });
    seen = looks_.load(std::memory_order_acquire);
    AskAll();
  }
}

void FailureWatch::AskAll() {
  const std::scoped_lock lock(mutex_);
  for (const auto& [crossing, name] : crossings_) {
    if (context_.failed()) return;
    const cudaError_t state = cudaStreamQuery(crossing);
    if (state != cudaErrorNotReady) context_.Check(state, "cudaStreamQuery", name);
  }
}

}  // namespace ebb
