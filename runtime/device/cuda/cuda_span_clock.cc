#include "ebb/runtime/device/cuda/cuda_span_clock.h"

#include <chrono>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/cuda/cuda_stream.h"
#include "ebb/runtime/device/cuda/error.h"

namespace ebb {
namespace {

constexpr int kTies = 5;  // the first may be slow
// In fp32 milliseconds, steps of 1 us come after 8 s.
constexpr int64_t kTieLastsNs = int64_t{10'000'000'000};

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaSpanClock>> CudaSpanClock::Create(
    std::shared_ptr<CudaContext> context) {
  EBB_RETURN_IF_ERROR(context->status());
  std::unique_ptr<CudaSpanClock> clock(new CudaSpanClock(std::move(context)));
  EBB_RETURN_IF_ERROR(clock->TieToHost());
  return clock;
}

CudaSpanClock::~CudaSpanClock() {
  const CudaCurrent current(context_->ordinal());
  for (const Pair& pair : pairs_) {
    cudaEventDestroy(pair.begin);
    if (pair.end != nullptr) cudaEventDestroy(pair.end);
  }
}

CudaSpanClock::Tie::~Tie() {
  if (event != nullptr) cudaEventDestroy(event);
}

absl::Status CudaSpanClock::MakeEvent(cudaEvent_t& event) const {
  return CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDefault),
                    absl::StrCat("creating an event with a time of ", context_->name()));
}

// Measured on an idle stream of its own. The shortest of several waits gives the best tie. A time
// is never shown earlier than the host enqueued the work.
absl::Status CudaSpanClock::TieToHost() {
  EBB_ASSIGN_OR_RETURN(const SharedCudaStream stream, NewCudaStream(*context_, "tie of clocks"));
  const CudaCurrent current(context_->ordinal());
  int64_t shortest = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < kTies; ++i) {
    const auto tie = std::make_shared<Tie>();
    EBB_RETURN_IF_ERROR(MakeEvent(tie->event));
    const int64_t before = NowNs();
    cudaError_t result = cudaEventRecord(tie->event, stream.get());
    if (result == cudaSuccess) result = cudaEventSynchronize(tie->event);
    tie->ns = NowNs();
    EBB_RETURN_IF_ERROR(CudaStatus(
        result, absl::StrCat("tying the clock of ", context_->name(), " to the host's")));
    if (tie->ns - before >= shortest) continue;
    shortest = tie->ns - before;
    tie_ = tie;
  }
  return absl::OkStatus();
}

absl::Status CudaSpanClock::Reserve(int pairs) {
  const CudaCurrent current(context_->ordinal());
  // Times since an old tie have coarse steps, and the clocks have drifted apart.
  if (NowNs() - tie_->ns > kTieLastsNs) EBB_RETURN_IF_ERROR(TieToHost());
  pairs_.reserve(static_cast<size_t>(pairs));
  unused_.reserve(static_cast<size_t>(pairs));
  while (static_cast<int>(pairs_.size()) < pairs) {
    Pair& pair = pairs_.emplace_back();
    absl::Status made = MakeEvent(pair.begin);
    if (made.ok()) made = MakeEvent(pair.end);
    if (!made.ok()) {
      if (pair.begin == nullptr) pairs_.pop_back();
      return made;
    }
    unused_.push_back(static_cast<int>(pairs_.size()) - 1);
  }
  return absl::OkStatus();
}

void CudaSpanClock::Record(cudaEvent_t event, Stream& stream) {
  if (context_->failed()) return;
  const CudaCurrent current(context_->ordinal());
  context_->Check(cudaEventRecord(event, static_cast<cudaStream_t>(stream.view().native)),
                  "cudaEventRecord", "a traced stream");
}

int CudaSpanClock::Begin(Stream& stream) {
  if (unused_.empty()) return -1;
  const int pair = unused_.back();
  unused_.pop_back();
  pairs_[pair].tie = tie_;
  Record(pairs_[pair].begin, stream);
  return pair;
}

void CudaSpanClock::End(int pair, Stream& stream) {
  Record(pairs_[pair].end, stream);
}

SpanClock::State CudaSpanClock::Take(int number, Span& span) {
  const Pair& pair = pairs_[number];
  const CudaCurrent current(context_->ordinal());
  const auto at = [&](cudaEvent_t event, int64_t& ns) {
    float milliseconds = 0;
    const cudaError_t result = cudaEventElapsedTime(&milliseconds, pair.tie->event, event);
    ns = pair.tie->ns + static_cast<int64_t>(double{milliseconds} * 1e6);
    return result;
  };
  State state = State::kLost;
  if (!context_->failed()) {
    cudaError_t result = cudaEventQuery(pair.end);
    if (result == cudaErrorNotReady) {
      cudaGetLastError();  // so that a trainer does not find it as CUDA's last error
      return State::kUnderWay;
    }
    if (result == cudaSuccess) result = at(pair.begin, span.begin_ns);
    if (result == cudaSuccess) result = at(pair.end, span.end_ns);
    if (context_->Check(result, "cudaEventElapsedTime", "a traced stream")) state = State::kOver;
  }
  unused_.push_back(number);
  return state;
}

}  // namespace ebb
