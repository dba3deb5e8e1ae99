// The reader that other tests use for timelines: it must refuse what Perfetto would not show.
#include "tests/trace/trace_events.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <initializer_list>
#include <ostream>
#include <string>

namespace ebb::trace_events_test {
namespace {

using ::testing::HasSubstr;

const std::string kNames =
    R"({"name":"process_name","ph":"M","pid":0,"tid":0,"args":{"name":"engine"}},)"
    R"({"name":"thread_name","ph":"M","pid":0,"tid":0,"args":{"name":"compute"}})";

// A span on the track that kNames names.
std::string Span(const std::string& times) {
  return R"({"name":"s","cat":"s","ph":"X","pid":0,"tid":0,)" + times +
         R"(,"args":{"step":0,"bytes":0}})";
}

std::string Array(std::initializer_list<std::string> events) {
  std::string text = "[";
  for (const std::string& event : events) {
    if (text.size() > 1) text += ",";
    text += event;
  }
  return text.append("]");
}

struct Case {
  std::string name, text;
  std::string says;  // part of the error; empty: the text is accepted
};
void PrintTo(const Case& test, std::ostream* out) {
  *out << test.name;
}

class TraceEvents : public ::testing::TestWithParam<Case> {};

TEST_P(TraceEvents, AreReadOrRefused) {
  const std::string path = ::testing::TempDir() + "trace_events_test." + std::to_string(getpid());
  std::ofstream(path) << GetParam().text;
  const absl::StatusOr<TraceTracks> tracks = ReadTraceEvents(path);
  unlink(path.c_str());
  if (GetParam().says.empty()) {
    EXPECT_TRUE(tracks.ok()) << tracks.status();
  } else {
    EXPECT_THAT(std::string(tracks.status().message()), HasSubstr(GetParam().says));
  }
}

const Case kCases[] = {
    {"Empty", "[]", ""},
    {"NamedSpan", Array({kNames, Span(R"("ts":1.5,"dur":0)")}), ""},
    {"Nested",
     Array(
         {kNames, Span(R"("ts":1,"dur":3)"), Span(R"("ts":1,"dur":2)"), Span(R"("ts":3,"dur":1)")}),
     ""},
    {"NoText", "", "not one JSON array"},
    {"NotClosed", "[{}", "not one JSON array"},
    {"CommaBeforeTheEnd", Array({kNames, ""}), "not one JSON array"},
    {"TwoArrays", "[][]", "not one JSON array"},
    {"Object", "{}", "not one JSON array"},
    {"NumberAsEvent", "[1]", "not an object"},
    {"NoPhase", R"([{"name":"a","pid":0,"tid":0,"args":{}}])", "unknown phase"},
    {"NegativePid", R"([{"name":"a","ph":"X","pid":-1,"tid":0,"args":{}}])", "no pid or tid"},
    {"NoTid", R"([{"name":"a","ph":"X","pid":0,"args":{}}])", "no pid or tid"},
    {"NoTime", Array({kNames, Span(R"("dur":1)")}), "ts must be"},
    {"TimeAsText", Array({kNames, Span(R"("ts":"1","dur":1)")}), "ts must be"},
    {"NoDuration", Array({kNames, Span(R"("ts":1)")}), "dur must be"},
    {"NegativeDuration", Array({kNames, Span(R"("ts":1,"dur":-1)")}), "dur must be"},
    {"TrackWithoutName", Array({Span(R"("ts":1,"dur":1)")}), "no name"},
    {"Overlap", Array({kNames, Span(R"("ts":1,"dur":2)"), Span(R"("ts":2,"dur":2)")}), "overlaps"},
    {"LongerAfterShorterAtOneTime",
     Array({kNames, Span(R"("ts":1,"dur":2)"), Span(R"("ts":1,"dur":3)")}), "overlaps"},
};

INSTANTIATE_TEST_SUITE_P(Texts, TraceEvents, ::testing::ValuesIn(kCases),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace ebb::trace_events_test
