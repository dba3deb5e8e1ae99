// Headers, manifests, indexes and files of torch with random changes, from a fixed seed. Each is
// refused, or its ranges lie in its file. The sanitizers' presets run this test, too. EBB_FULL=1:
// 100 times as many.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/model_index.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "ebb/runtime/checkpoint/slice_name.h"
#include "ebb/runtime/checkpoint/torch_file.h"
#include "tests/checkpoint/torch_archive.h"
#include "tests/full.h"

namespace ebb::untrusted_files_test {
namespace {

int Rounds() {
  return testing::Full() ? 2'000'000 : 20'000;
}

// A few bytes changed, put in, taken out or doubled; also what parsers take for structure and large
// numbers.
std::string Mutated(std::string text, std::mt19937& random) {
  static const std::vector<std::string> kPieces = {"{",
                                                   "}",
                                                   "[",
                                                   "]",
                                                   "\"",
                                                   ":",
                                                   ",",
                                                   "\\u0000",
                                                   "-1",
                                                   "1e99",
                                                   "18446744073709551615",
                                                   "9223372036854775807",
                                                   "4611686018427387904",
                                                   "null",
                                                   "../",
                                                   "[0, 4]",
                                                   "F32"};
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
    const auto read = ParseModelIndex(Mutated(text, random), "index", ".safetensors");
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

// Changes the whole archive, or the pickle alone, so that more changes reach the pickle.
TEST(UntrustedFilesTest, ATensorOfTorchThatIsTakenLiesInItsFile) {
  using testing::PickledDict, testing::PickledInt, testing::PickledTensor;
  const std::vector<std::string> storages = {std::string(24, 'x'), std::string(8, 'y')};
  const std::string piece = PickledDict(
      {{"a", PickledTensor({.shape = {2, 3}})},
       {"b", PickledTensor(
                 {.storage = "HalfStorage", .key = "1", .shape = {3}, .stored = 4, .offset = 1})},
       {"n", PickledInt(-70000)},
       {"s", testing::PickledSize({2, 3})}});
  const std::string path = ::testing::TempDir() + "/untrusted.pt";
  std::mt19937 random(4);
  int taken = 0;
  for (int round = 0; round < Rounds() / 10; ++round) {
    const testing::ZipForm form = {.zip64 = random() % 2 == 0};
    const std::string bytes = random() % 2 == 0
                                  ? Mutated(testing::TorchArchive(piece, storages, form), random)
                                  : testing::TorchArchive(Mutated(piece, random), storages, form);
    std::ofstream(path, std::ios::binary) << bytes;
    const auto expect_refused = [&](const absl::Status& status) {
      ASSERT_TRUE(absl::IsDataLoss(status) || absl::IsInvalidArgument(status)) << status;
    };
    const auto file =
        TorchFile::Open(path, round % 2 == 0 ? TorchGlobals::kOfTensors : TorchGlobals::kAny);
    if (!file.ok()) {
      expect_refused(file.status());
      continue;
    }
    const PickleValue& root = file->pickle().root();
    for (const char* name : {"a", "b", "n", "s"}) {
      const PickleValue* const value = file->pickle().Find(root, name);
      if (value == nullptr) continue;
      file->NumberOf(*value, name).IgnoreError();
      file->SizesOf(*value, name).IgnoreError();
      const auto tensor = file->TensorOf(*value, name);
      if (!tensor.ok()) {
        expect_refused(tensor.status());
        continue;
      }
      ++taken;
      int64_t size = tensor->dtype ? SizeOf(*tensor->dtype) : 1;
      for (const int64_t dimension : tensor->shape) size *= dimension;
      ASSERT_GE(tensor->at, 0);
      ASSERT_LE(tensor->at + size, static_cast<int64_t>(bytes.size()));
    }
  }
  EXPECT_GT(taken, 0);
  std::remove(path.c_str());
}

}  // namespace
}  // namespace ebb::untrusted_files_test
