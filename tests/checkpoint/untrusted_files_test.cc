// Headers, manifests and indexes with random changes, from a fixed seed. Each is refused, or its
// ranges lie in its file. The sanitizers' presets run this test, too. EBB_FULL=1: 100 times as
// many.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/model_files.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "tests/full.h"

namespace ebb::untrusted_files_test {
namespace {

int Rounds() {
  return testing::Full() ? 2'000'000 : 20'000;
}

// A few bytes changed, put in, taken out or doubled; also what parsers take for structure and large
// numbers.
std::string Mutated(std::string text, std::mt19937& random) {
  static const std::vector<std::string> kPieces =
      absl::StrSplit(R"({ } [ ] " : , \u0000 -1 1e99 18446744073709551615 9223372036854775807 )"
                     R"(4611686018427387904 null ../ [0,4] F32)",
                     ' ');
  const auto below = [&](size_t n) {
    return static_cast<size_t>(random() % std::max<size_t>(n, 1));
  };
  for (size_t changes = 1 + below(4); changes-- > 0;) {
    const size_t at = below(text.size()), length = below(std::min<size_t>(text.size() - at, 24));
    switch (below(4)) {
      case 0:
        if (!text.empty()) text[at] = static_cast<char>(random());
        break;
      case 1:
        text.insert(at, kPieces[below(kPieces.size())]);
        break;
      case 2:
        text.erase(at, length);
        break;
      default:
        text.insert(at, text.substr(at, length));
    }
  }
  return text;
}

TEST(UntrustedFilesTest, AHeaderThatIsTakenLiesInItsFile) {
  SafetensorsHeader header;
  header.tensors = {{.name = "master/a@0:3", .dtype = "F32", .shape = {3}, .begin = 0, .end = 12},
                    {.name = "b", .dtype = "BF16", .shape = {2, 5}, .begin = 12, .end = 32},
                    {.name = "none", .dtype = "U8", .shape = {4, 0}, .begin = 32, .end = 32}};
  header.metadata = {{"format", "pt"}};
  const std::string text = SafetensorsPrefix(header, 8).substr(8);
  std::mt19937 random(1);
  int taken = 0;
  for (int round = 0; round < Rounds(); ++round) {
    const std::string changed = Mutated(text, random);
    const int64_t file_bytes = static_cast<int64_t>(changed.size()) + 8 + 32;
    const auto read = ParseSafetensorsHeader(changed, file_bytes, "file");
    if (!read.ok()) {
      ASSERT_EQ(read.status().code(), absl::StatusCode::kDataLoss);
      continue;
    }
    ++taken;
    int64_t end = 0;
    for (const StoredTensor& tensor : read->tensors) {
      ASSERT_EQ(tensor.begin, end) << changed;
      end = tensor.end;
      ASSERT_LE(read->data_begin + end, file_bytes) << changed;
      ParseSliceName(tensor.name);
    }
    ASSERT_EQ(end, 32) << changed;
  }
  EXPECT_GT(taken, 0);  // names may change
}

TEST(UntrustedFilesTest, AManifestThatIsTakenIsWrittenAndReadAlike) {
  const std::string text =
      ToText({.state = {.finished_steps = 12, .applied_steps = 10, .skipped_steps = 2},
              .config = "{}",
              .parameters = {{.name = "w",
                              .shape = {3, 4},
                              .trainable = true,
                              .group = "g",
                              .dtype = DType::kFloat32,
                              .states = {"exp_avg"}}},
              .files = {{.bytes = 5000, .header_checksum = 7}},
              .trainer = {{"place", "abc"}}});
  constexpr std::string_view kField = "\"checksum\": \"";
  std::mt19937 random(2);
  int taken = 0;
  for (int round = 0; round < Rounds(); ++round) {
    std::string changed = Mutated(text, random);
    // With the right checksum, as an attacker writes it.
    const size_t digits = changed.find(kField);
    if (digits != std::string::npos && digits + kField.size() + 16 <= changed.size()) {
      changed.replace(digits + kField.size(), 16, std::string(16, '0'));
      const uint64_t sum = optim::Checksum(std::as_bytes(std::span(changed)));
      changed.replace(digits + kField.size(), 16, absl::StrFormat("%016x", sum));
    }
    const auto read = ParseManifest(changed, "manifest.json");
    if (!read.ok()) {
      // If the number of the version changed: an error about another version.
      ASSERT_TRUE(absl::IsDataLoss(read.status()) || absl::IsFailedPrecondition(read.status()))
          << read.status();
      continue;
    }
    ++taken;
    const auto again = ParseManifest(ToText(*read), "manifest.json");
    ASSERT_TRUE(again.ok()) << again.status() << changed;
    ASSERT_EQ(*again, *read) << changed;
  }
  EXPECT_GT(taken, 0);
}

TEST(UntrustedFilesTest, AnIndexThatIsTakenNamesPlainFiles) {
  const std::string text = SafetensorsIndexText(
      {{"a", "model-00001-of-00002.safetensors"}, {"b", "model-00002-of-00002.safetensors"}}, 100);
  std::mt19937 random(3);
  int taken = 0;
  for (int round = 0; round < Rounds(); ++round) {
    const auto read = ParseModelIndex(Mutated(text, random), "index");
    if (!read.ok()) {
      ASSERT_EQ(read.status().code(), absl::StatusCode::kDataLoss);
      continue;
    }
    ++taken;
    for (const auto& [tensor, file] : *read) {
      ASSERT_EQ(file.find('/'), std::string::npos);
      ASSERT_EQ(file.find('\0'), std::string::npos);
      ASSERT_NE(file.front(), '.');
    }
  }
  EXPECT_GT(taken, 0);
}

}  // namespace
}  // namespace ebb::untrusted_files_test
