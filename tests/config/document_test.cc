#include "ebb/runtime/config/document.h"

#include <string>

#include "ebb/runtime/base/message.h"
#include "ebb/runtime/config/reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ebb::config::document_test {
namespace {

using ::testing::HasSubstr;

std::string ErrorOf(const std::string& text) {
  const absl::StatusOr<Document> document = ParseDocument(text);
  const absl::Status status = document.ok() ? document->problems.status() : document.status();
  EXPECT_FALSE(status.ok()) << text;
  return std::string(status.message());
}

TEST(ParseDocument, KeepsOrderAndTypes) {
  const absl::StatusOr<Document> document = ParseDocument(
      R"({"z": [1, -2, 3.5, {"n": null}], "a": {"t": true, "s": "\u00e4\n"}, "e": {}})");
  ASSERT_TRUE(document.ok()) << document.status();
  EXPECT_EQ(document->root.dump(),
            "{\"z\":[1,-2,3.5,{\"n\":null}],\"a\":{\"t\":true,\"s\":\"\xc3\xa4\\n\"},"
            "\"e\":{}}");
}

TEST(ParseDocument, AllowsCommentsAndTrailingCommas) {
  const absl::StatusOr<Document> document = ParseDocument(R"(// first
{ # as hjson has them
  "a": [1, 2, /* between */ ], // after
  "b": "// no # comment, /* at all */ \" ,}", /* over
  two lines */
  "c": {"d": 1,},
}  // last)");
  ASSERT_TRUE(document.ok()) << document.status();
  EXPECT_EQ(document->root.dump(),
            R"({"a":[1,2],"b":"// no # comment, /* at all */ \" ,}","c":{"d":1}})");
}

TEST(ParseDocument, NamesLineAndColumn) {
  EXPECT_THAT(ErrorOf("{\n  \"a\": 1,\n  \"b\": nul\n}"), HasSubstr("line 3, column 11"));
  EXPECT_THAT(ErrorOf("{\"a\" 1}"), HasSubstr("line 1, column 6"));
  EXPECT_THAT(ErrorOf("{\"a\": 1} x"), HasSubstr("line 1, column 10"));
  // Removed comments and commas do not move anything.
  EXPECT_THAT(ErrorOf("/* 1\n2 */ {\"a\": [1,], !}"), HasSubstr("line 2, column 18"));
  EXPECT_THAT(ErrorOf("{\"a\": 1, /* never"),
              HasSubstr("line 1, column 10: the comment does not end"));
}

TEST(ParseDocument, RefusesTextThatIsNotJson) {
  for (const char* text : {"{",
                           "}",
                           "{\"a\"}",
                           "{\"a\":}",
                           "{a: 1}",
                           "{'a': 1}",
                           "{\"a\": 01}",
                           "{\"a\": +1}",
                           "{\"a\": .5}",
                           "{\"a\": 1.}",
                           "{\"a\": NaN}",
                           "{\"a\": Infinity}",
                           "{\"a\": [,]}",
                           "{\"a\": [1,,]}",
                           "{,}",
                           "{\"a\": 1,,}",
                           "{\"a\": tru}",
                           "{\"a\": \"}",
                           "{\"a\": \"\\x\"}",
                           "{\"a\": \"\n\"}",
                           "{\"a\": \"\\ud800\"}",
                           "{\"a\": 1 \"b\": 2}",
                           "{} {}",
                           "{}]",
                           "{\"a\": 1/}"}) {
    EXPECT_THAT(ErrorOf(text), HasSubstr("line 1, column ")) << text;
  }
}

TEST(ParseDocument, RefusesInvalidUtf8) {
  EXPECT_THAT(ErrorOf("{\"a\": \"\xff\"}"), HasSubstr("line 1, column 8"));
  EXPECT_THAT(ErrorOf("{\"a\": \"\xc0\x80\"}"), HasSubstr("UTF-8"));
  ErrorOf("\xef\xbb{}");
  EXPECT_TRUE(ParseDocument("\xef\xbb\xbf{}").ok()) << "a byte order mark is legal";
}

TEST(Messages, PutAReplacementCharacterWhereThereIsNoUtf8) {
  EXPECT_EQ(Shortened("a\xff\xfe b"), "a\xef\xbf\xbd\xef\xbf\xbd b");
  EXPECT_EQ(Shortened("\xc3\xa4 \xed\xa0\x80"), "\xc3\xa4 \xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_EQ(Shortened("\x07\xc3\xa4\xc3\xa4", 4), "\\x07\xc3\xa4...");
  for (const char* text : {"{\"a\": \"\xff\"}", "{\"\xc0\x80\": 1}", "{\xf8: 1}", "\xff"}) {
    EXPECT_TRUE(IsUtf8(ErrorOf(text))) << text;
    EXPECT_FALSE(IsUtf8(text));
  }
}

TEST(ParseDocument, RefusesNumbersBeyondFp64) {
  EXPECT_THAT(ErrorOf("{\"a\": 1e400}"), HasSubstr("line 1, column"));
  EXPECT_TRUE(ParseDocument("{\"a\": 1e-400}").ok());
}

TEST(ParseDocument, RefusesDuplicateKeysByPath) {
  EXPECT_EQ(ErrorOf(R"({"a": 1, "b": 2, "a": 3})"),
            "line 1, column 18: the key \"a\" is there twice");
  EXPECT_EQ(ErrorOf(R"({"x": {"y": [1, {"z": 1, "z": 1}]}})"),
            "line 1, column 26: the key \"x.y.z\" is there twice");
  EXPECT_TRUE(ParseDocument(R"({"x": {"a": 1}, "y": {"a": 1}, "z": [{"a": 1}, {"a": 2}]})").ok());
}

// Later ones are ignored, whatever they contain.
TEST(ParseDocument, ReportsEveryDuplicateKey) {
  EXPECT_EQ(ErrorOf("{\"a\": 1,\n \"a\": {\"b\": 1, \"b\": [{\"c\": 1}], \"c\": 2},\n \"a\": []}"),
            "3 problems\n  line 2, column 2: the key \"a\" is there twice"
            "\n  line 2, column 16: the key \"a.b\" is there twice"
            "\n  line 3, column 2: the key \"a\" is there twice");
}

TEST(ParseDocument, KnowsLineAndColumnOfEveryKey) {
  absl::StatusOr<Document> document = ParseDocument(
      "\xef\xbb\xbf{\"a\": [1, -2.5e3, \"b\", true, {}], // \"c\": 1\n  \"d\": {\"\\\"e\": "
      "null,\n\"f\": 1,},}");
  ASSERT_TRUE(document.ok()) << document.status();
  for (const char* path : {"d.f", "a", "d.\"e", "d", "absent"}) {
    document->problems.Add(path, {path});
  }
  EXPECT_EQ(
      std::string(document->problems.status().message()),
      "5 problems\n  line 1, column 5: a\n  line 2, column 3: d\n  line 2, column 9: d.\"e\n  "
      "line 3, column 1: d.f\n  absent");
}

TEST(ParseDocument, RefusesValuesThatAreNotObjects) {
  EXPECT_EQ(ErrorOf("[1]"), "it must be an object, {...}, but it is [1]");
  EXPECT_EQ(ErrorOf("true"), "it must be an object, {...}, but it is true");
}

TEST(ParseDocument, RefusesEmptyText) {
  EXPECT_THAT(ErrorOf(""), HasSubstr("it is empty"));
  EXPECT_THAT(ErrorOf(" \n\t"), HasSubstr("it is empty"));
  EXPECT_THAT(ErrorOf("// only this"), HasSubstr("line 1"));
}

TEST(ParseDocument, BoundsDepthSizeAndKeys) {
  const auto nested = [](size_t depth) {
    std::string text;
    for (size_t i = 0; i < depth; ++i) text += "{\"a\":";
    return Join({text, "1", std::string(depth, '}')});
  };
  EXPECT_TRUE(ParseDocument(nested(kDocumentDepthMax)).ok());
  EXPECT_THAT(ErrorOf(nested(kDocumentDepthMax + 1)), HasSubstr("nests deeper than 32"));
  EXPECT_THAT(ErrorOf(nested(100'000)), HasSubstr("nests deeper than 32"));
  EXPECT_THAT(ErrorOf(Join({"{\"a\":", std::string(1'000'000, '[')})),
              HasSubstr("nests deeper than 32"));
  EXPECT_THAT(ErrorOf(std::string(kDocumentBytesMax + 1, ' ')),
              HasSubstr("more than 1048576 bytes"));
  std::string many = "{\"a\": {";
  for (int i = 0; i <= 1000; ++i) many += Join({Quoted(std::to_string(i)), ": 1,"});
  EXPECT_EQ(ErrorOf(many + "}}"), "\"a\" has more than 1000 keys");
}

TEST(ParseDocument, MessagesAreShort) {
  const std::string many(100'000, 'x');
  EXPECT_LT(ErrorOf(Join({"{\"a\": \"", many})).size(), 400u);
  EXPECT_LT(ErrorOf(Join({"{\"", many, "\":1,\"", many, "\":1}"})).size(), 400u);
}

// A file with parameters but without a type is refused later. The file's values stay unchanged.
TEST(FillFromTrainer, ParametersOfAnOptimizerWithoutATypeAreNotReplaced) {
  absl::StatusOr<Document> document = ParseDocument(R"({"optimizer": {"params": {"lr": 0.5}}})");
  ASSERT_TRUE(document.ok()) << document.status();
  Reading reading = ReadValues(*document, std::nullopt);
  FillFromTrainer({.learning_rate = 3e-4, .epsilon = 1e-6}, reading, document->problems);
  EXPECT_EQ(*reading.values.Value("optimizer.params.lr"), 0.5);
  EXPECT_EQ(*reading.values.Value("optimizer.params.eps"), 1e-6);
}

}  // namespace
}  // namespace ebb::config::document_test
