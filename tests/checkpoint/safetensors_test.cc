// Headers of safetensors files, from us and from any other program.
#include "ebb/runtime/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ebb/runtime/checkpoint/rank_file.h"
#include "tests/status.h"

namespace ebb::testing::safetensors_test {
namespace {

TEST(SafetensorsTest, ReadsBackWhatItWrote) {
  SafetensorsHeader header;
  header.tensors = {
      {.name = "master/a \"b\"@0:3", .dtype = "F32", .shape = {3}, .begin = 0, .end = 12},
      {.name = "scalar", .dtype = "BF16", .shape = {}, .begin = 12, .end = 14},
      {.name = "nothing", .dtype = "U8", .shape = {4, 0}, .begin = 14, .end = 14}};
  header.metadata = {{"key", "value"}};
  const std::string prefix = SafetensorsPrefix(header, 4096);
  ASSERT_EQ(prefix.size(), 4096u);
  ASSERT_OK_AND_ASSIGN(const auto read, ParseSafetensorsHeader(std::string_view(prefix).substr(8),
                                                               4096 + 14, "file"));
  EXPECT_EQ(read.data_begin, 4096);
  EXPECT_EQ(read.metadata, header.metadata);
  ASSERT_EQ(read.tensors.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(read.tensors[i].name, header.tensors[i].name);
    EXPECT_EQ(read.tensors[i].dtype, header.tensors[i].dtype);
    EXPECT_EQ(read.tensors[i].shape, header.tensors[i].shape);
    EXPECT_EQ(read.tensors[i].begin, header.tensors[i].begin);
    EXPECT_EQ(read.tensors[i].end, header.tensors[i].end);
  }
}

// torch has these dtypes, so any file may have them.
TEST(SafetensorsTest, ReadsHeadersWithDtypesOfTorchAlone) {
  const auto parse = [](const std::string& dtype, const std::string& shape, int64_t bytes) {
    const std::string end = std::to_string(bytes);
    const std::string text = R"({"a": {"dtype": ")" + dtype + R"(", "shape": )" + shape +
                             R"(, "data_offsets": [0, )" + end + "]}}";
    return ParseSafetensorsHeader(text, static_cast<int64_t>(text.size()) + 8 + bytes, "file")
        .status();
  };
  for (const char* dtype : {"F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
    EXPECT_EQ(parse(dtype, "[3, 2]", 6), absl::OkStatus()) << dtype;
  EXPECT_EQ(parse("C64", "[3]", 24), absl::OkStatus());
  EXPECT_EQ(parse("F4", "[3, 2]", 3), absl::OkStatus());
  EXPECT_EQ(parse("F6_E2M3", "[4]", 3), absl::OkStatus());
  EXPECT_THAT(parse("F4", "[3]", 2), Says("do not fill whole bytes"));
}

struct Wrong {
  const char* text;
  const char* said;
};

TEST(SafetensorsTest, ABrokenHeaderIsRefusedWithAReason) {
  const std::string deep(100'000, '[');
  const Wrong kWrong[] = {
      {"", "not a JSON object"},
      {"[]", "not a JSON object"},
      {"{", "not a JSON object"},
      {deep.c_str(), "not a JSON object"},
      {R"({"a": 1})", "other fields"},
      {R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "more": 1}})",
       "other fields"},
      {R"({"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}})", "unknown dtype"},
      {R"({"a": {"dtype": 4, "shape": [1], "data_offsets": [0, 4]}})", "its dtype is not a name"},
      {R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}})",
       "4 bytes, but its shape needs 8"},
      {R"({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})", "not a list of sizes"},
      {R"({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}})", "not a list of sizes"},
      {R"({"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 0]}})",
       "not a list of sizes"},
      {R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})",
       "outside of the 4 bytes"},
      {R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}})",
       "outside of the 4 bytes"},
      {R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}})", "offsets are not a pair"},
      {R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})",
       "a name twice"},
      {R"({"a": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}, "b": {"dtype": "I8", "shape": [3], "data_offsets": [1, 4]}})",
       "overlap, or leave a hole"},
      {R"({"a": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}, "b": {"dtype": "I8", "shape": [1], "data_offsets": [3, 4]}})",
       "overlap, or leave a hole"},
      {R"({"a": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]}})", "end at byte 3 of 4"},
      {R"({"__metadata__": {"a": 1}})", "not a string"},
      {R"({"__metadata__": []})", "not a JSON object"},
      {R"({"__metadata__": {}, "__metadata__": {}})", "a name twice"},
      {R"({"__metadata__": {"a": "1", "a": "2"}})", "a name twice"},
      {R"({"__metadata__": {"a": {}}})", "not a string"},
      {R"({"a": {"dtype": "F32", "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})",
       "a name twice"},
      {R"([{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}])", "not a JSON object"},
      {R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}})",
       "offsets are not a pair"},
      {R"({"a": {"dtype": "F32", "shape": {}, "data_offsets": [0, 4]}})",
       "its shape is not a list"},
      {R"({"a": {"dtype": "F32", "data_offsets": [0, 4]}})", "other fields"},
      {R"({"a": {"dtype": "F32", "shape": [[[[[1]]]]], "data_offsets": [0, 4]}})",
       "nested too deeply"},
  };
  for (const Wrong& wrong : kWrong) {
    const std::string_view text = wrong.text;
    const auto read =
        ParseSafetensorsHeader(text, static_cast<int64_t>(text.size()) + 8 + 4, "some file");
    EXPECT_THAT(read.status(), StatusIs(absl::StatusCode::kDataLoss, wrong.said, "'some file'"))
        << text.substr(0, 200);
  }
}

std::string Repeated(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

TEST(SafetensorsTest, ATensorHasAtMost64Dimensions) {
  const auto parse = [](int dimensions) {
    const std::string text = R"({"a": {"dtype": "I8", "shape": [1)" +
                             Repeated(",1", dimensions - 1) + R"(], "data_offsets": [0, 1]}})";
    return ParseSafetensorsHeader(text, static_cast<int64_t>(text.size()) + 8 + 1, "file").status();
  };
  EXPECT_EQ(parse(64), absl::OkStatus());
  EXPECT_THAT(parse(65), Says("its shape is not a list of sizes"));
}

TEST(SafetensorsTest, TheNumberOfEntriesIsLimited) {
  std::string text = R"({"__metadata__": {)";
  for (size_t i = 0; i <= kSafetensorsEntriesMax; ++i)
    text += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":\"\"";
  text += "}}";
  const auto read = ParseSafetensorsHeader(text, static_cast<int64_t>(text.size()) + 8, "file");
  EXPECT_THAT(read.status(), Says("more than 1048576 entries"));
}

TEST(SliceNameTest, IsReadAsItWasWritten) {
  for (const char* parameter : {"a", "layers.0.weight", "a/b", "a@b:c", "@", "/", ""}) {
    const SliceName slice = {.of = "exp_avg", .parameter = parameter, .begin = 3, .end = 1000};
    const auto read = ParseSliceName(NameOf(slice));
    if (std::string_view(parameter).empty()) {
      EXPECT_FALSE(read.has_value());
    } else {
      ASSERT_TRUE(read.has_value()) << NameOf(slice);
      EXPECT_EQ(*read, slice);
    }
  }
  for (const char* text :
       {"", "a", "a/b", "a/b@", "a/b@1", "a/b@1:", "a/b@:2", "a/b@2:2", "a/b@3:2", "a/b@-1:2",
        "a/b@1:2x", "/b@1:2", "b@1:2", "a/b@1:99999999999999999999"})
    EXPECT_FALSE(ParseSliceName(text).has_value()) << text;
}

}  // namespace
}  // namespace ebb::testing::safetensors_test
