#include "tests/trace/trace_events.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb {
namespace {

using nlohmann::json;

absl::Status Refuse(const json& event, const char* why) {
  return absl::InvalidArgumentError(absl::StrCat(why, ": ", event.dump()));
}

bool IsString(const json& event, const char* key) {
  return event.contains(key) && event[key].is_string();
}
// Perfetto keeps process and thread numbers in 32 bits.
bool IsId(const json& event, const char* key) {
  return event.contains(key) && event[key].is_number_unsigned() &&
         event[key].get<uint64_t>() <= UINT32_MAX;
}
bool IsCount(const json& event, const char* key) {
  return event.contains(key) && event[key].is_number_integer() && event[key].get<int64_t>() >= 0;
}
bool IsTime(const json& event, const char* key) {
  return event.contains(key) && event[key].is_number() && event[key].get<double>() >= 0;
}
// Microseconds to nanoseconds; exact below 2^52 of them, 52 days.
int64_t Nanoseconds(const json& event, const char* key) {
  return std::llround(event[key].get<double>() * 1000);
}

absl::Status ReadMetadata(const json& event, TraceTracks& tracks) {
  static const std::map<std::string, std::string> kArgument = {{"process_name", "name"},
                                                               {"process_labels", "labels"},
                                                               {"process_sort_index", "sort_index"},
                                                               {"thread_name", "name"},
                                                               {"thread_sort_index", "sort_index"}};
  const std::string name = event["name"];
  const auto found = kArgument.find(name);
  if (found == kArgument.end()) return Refuse(event, "unknown metadata");
  const std::string& key = found->second;
  if (key == "sort_index") {
    return IsCount(event["args"], "sort_index") ? absl::OkStatus() : Refuse(event, "no sort_index");
  }
  if (!IsString(event["args"], key.c_str()) || event["args"][key].empty()) {
    return Refuse(event, "no name");
  }
  if (name == "process_name") tracks[{event["pid"], event["tid"]}].process = event["args"]["name"];
  if (name == "thread_name") tracks[{event["pid"], event["tid"]}].name = event["args"]["name"];
  return absl::OkStatus();
}

absl::Status ReadSpan(const json& event, TraceTracks& tracks) {
  if (!IsTime(event, "ts")) return Refuse(event, "ts must be a number, not negative");
  if (!IsTime(event, "dur")) return Refuse(event, "dur must be a number, not negative");
  if (!IsString(event, "cat")) return Refuse(event, "no category");
  const json& args = event["args"];
  if (IsCount(args, "step") == IsCount(args, "evaluation") || !IsCount(args, "bytes")) {
    return Refuse(event, "args must have bytes, and either step or evaluation");
  }
  TraceSpan span = {.name = event["name"],
                    .category = event["cat"],
                    .begin_ns = Nanoseconds(event, "ts"),
                    .end_ns = Nanoseconds(event, "ts") + Nanoseconds(event, "dur"),
                    .step = args.value("step", int64_t{0}),
                    .evaluation = args.value("evaluation", int64_t{0}),
                    .bytes = args["bytes"]};
  tracks[{event["pid"], event["tid"]}].spans.push_back(std::move(span));
  return absl::OkStatus();
}

absl::Status ReadEvent(const json& event, TraceTracks& tracks) {
  if (!event.is_object()) return Refuse(event, "not an object");
  if (!IsString(event, "name") || event["name"].empty()) return Refuse(event, "no name");
  if (!IsId(event, "pid") || !IsId(event, "tid")) return Refuse(event, "no pid or tid");
  if (!event.contains("args") || !event["args"].is_object()) return Refuse(event, "no args");
  const std::string phase = event.value("ph", "");
  if (phase == "M") return ReadMetadata(event, tracks);
  if (phase == "X") return ReadSpan(event, tracks);
  return Refuse(event, "unknown phase");
}

// Perfetto sorts by begin, keeps a stack of open spans for each track, and drops a span that
// outlives the span in which it began.
absl::Status CheckNesting(const TraceTrack& track) {
  std::vector<TraceSpan> spans = track.spans, open;
  std::stable_sort(spans.begin(), spans.end(),
                   [](const TraceSpan& a, const TraceSpan& b) { return a.begin_ns < b.begin_ns; });
  for (const TraceSpan& span : spans) {
    while (!open.empty() && open.back().end_ns <= span.begin_ns) open.pop_back();
    if (!open.empty() && span.end_ns > open.back().end_ns) {
      return absl::InvalidArgumentError(absl::StrCat("\"", span.name, "\" at ", span.begin_ns,
                                                     " ns overlaps \"", open.back().name,
                                                     "\" on track ", track.name));
    }
    open.push_back(span);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TraceTracks> ReadTraceEvents(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(path);
  const json events = json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!events.is_array()) return absl::InvalidArgumentError("not one JSON array");
  TraceTracks tracks;
  for (const json& event : events) EBB_RETURN_IF_ERROR(ReadEvent(event, tracks));
  std::map<int64_t, std::string> processes;
  for (const auto& [id, track] : tracks) {
    if (!track.process.empty()) processes[id.first] = track.process;
  }
  for (auto& [id, track] : tracks) {
    track.process = processes[id.first];
    if (track.process.empty() || (track.name.empty() && !track.spans.empty())) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", id.first, ", track ", id.second, " has spans but no name"));
    }
    EBB_RETURN_IF_ERROR(CheckNesting(track));
  }
  return tracks;
}

}  // namespace ebb
