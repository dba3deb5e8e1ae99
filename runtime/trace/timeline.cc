#include "ebb/runtime/trace/timeline.h"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/trace/event_file.h"

namespace ebb {
namespace {

// A JSON string with its quotes. Bytes that are not UTF-8 become U+FFFD.
std::string Quoted(std::string_view text) {
  using nlohmann::json;
  return json(text).dump(-1, ' ', false, json::error_handler_t::replace);
}

// Names a process or a thread. Each event has a tid: Perfetto takes a missing one to be the pid,
// and would show a thread of that number.
std::string MetadataEvent(std::string_view name, int rank, size_t track, std::string_view key,
                          const std::string& value) {
  std::string event = R"({"name":)";
  absl::StrAppend(&event, Quoted(name), R"(,"ph":"M","pid":)", rank, R"(,"tid":)", track,
                  R"(,"args":{)", Quoted(key), ":", value, "}}");
  return event;
}

// A "complete" event. Microseconds with three decimals, so that no nanosecond is lost.
std::string SpanEvent(const Timeline::Span& span, int rank) {
  const bool evaluates = span.evaluation > 0;
  std::string name = absl::StrCat(evaluates ? "evaluation: " : "", span.operation);
  if (!span.subject.empty()) name.append(" ").append(span.subject);
  const int64_t duration_ns = span.end_ns - span.begin_ns;
  return absl::StrFormat(R"({"name":%s,"cat":%s,"ph":"X","pid":%d,"tid":%d,"ts":%d.%03d,)"
                         R"("dur":%d.%03d,"args":{"%s":%d,"bytes":%d}})",
                         Quoted(name), Quoted(span.operation), rank, span.track,
                         span.begin_ns / 1000, span.begin_ns % 1000, duration_ns / 1000,
                         duration_ns % 1000, evaluates ? "evaluation" : "step",
                         evaluates ? span.evaluation : span.step, span.bytes);
}

}  // namespace

struct Timeline::State {
  struct Slot {
    Span span;
    std::atomic<bool> written{false};
  };

  explicit State(Options o)
      : options(std::move(o)), slots(static_cast<size_t>(options.spans_max)) {}

  // Spans in the order Perfetto nests them: by begin, the longer one first.
  std::vector<const Span*> Sorted() const {
    std::vector<const Span*> spans;
    spans.reserve(slots.size());
    for (const Slot& slot : slots) {
      if (slot.written.load(std::memory_order_acquire)) spans.push_back(&slot.span);
    }
    std::stable_sort(spans.begin(), spans.end(), [](const Span* a, const Span* b) {
      return std::pair(a->begin_ns, b->end_ns) < std::pair(b->begin_ns, a->end_ns);
    });
    return spans;
  }

  const Options options;
  std::vector<std::string> tracks;
  std::vector<Slot> slots;        // value-initialised: pages exist at once
  std::atomic<int64_t> added{0};  // also counts spans without a slot
};

Timeline::Timeline(Options options) : state_(std::make_unique<State>(std::move(options))) {}
Timeline::~Timeline() = default;

int Timeline::AddTrack(std::string name) {
  state_->tracks.push_back(std::move(name));
  return static_cast<int>(state_->tracks.size()) - 1;
}

void Timeline::Add(const Span& span) {
  assert(span.track >= 0 && static_cast<size_t>(span.track) < state_->tracks.size());
  assert(span.begin_ns >= 0 && span.begin_ns <= span.end_ns);
  const int64_t index = state_->added.fetch_add(1, std::memory_order_relaxed);
  if (index >= state_->options.spans_max) return;
  State::Slot& slot = state_->slots[index];
  slot.span = span;
  slot.written.store(true, std::memory_order_release);
}

int64_t Timeline::NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int64_t Timeline::dropped() const {
  return std::max<int64_t>(
      0, state_->added.load(std::memory_order_relaxed) - state_->options.spans_max);
}

absl::Status Timeline::Create(const std::string& path) {
  return EventFile::Create(path);
}

absl::Status Timeline::AppendTo(const std::string& path) const {
  const int rank = state_->options.rank;
  EBB_ASSIGN_OR_RETURN(EventFile file, EventFile::WaitOpen(path));
  const auto describe = [&](std::string_view name, size_t track, std::string_view key,
                            const std::string& value) {
    return file.Add(MetadataEvent(name, rank, track, key, value));
  };
  const std::string process = absl::StrCat(state_->options.name, " rank ", rank);
  EBB_RETURN_IF_ERROR(describe("process_name", 0, "name", Quoted(process)));
  EBB_RETURN_IF_ERROR(describe("process_sort_index", 0, "sort_index", absl::StrCat(rank)));
  if (dropped() > 0) {
    const std::string label = absl::StrCat(dropped(), " spans dropped");
    EBB_RETURN_IF_ERROR(describe("process_labels", 0, "labels", Quoted(label)));
  }
  for (size_t track = 0; track < state_->tracks.size(); ++track) {
    EBB_RETURN_IF_ERROR(describe("thread_name", track, "name", Quoted(state_->tracks[track])));
    EBB_RETURN_IF_ERROR(describe("thread_sort_index", track, "sort_index", absl::StrCat(track)));
  }
  for (const Span* span : state_->Sorted()) {
    EBB_RETURN_IF_ERROR(file.Add(SpanEvent(*span, rank)));
  }
  return file.Commit();
}

}  // namespace ebb
