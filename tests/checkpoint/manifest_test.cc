#include "ebb/runtime/checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <span>
#include <string>

#include "absl/strings/str_format.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/checkpoint/json_text.h"
#include "tests/status.h"

namespace ebb::testing::manifest_test {
namespace {

Manifest Example() {
  return {.state = {.finished_steps = 12,
                    .applied_steps = 10,
                    .skipped_steps = 2,
                    .loss_scaler = {.scale = 1024.5, .clean_steps = 3, .hysteresis_left = 1}},
          .reduction_group = 4,
          .run = "0123456789abcdef",
          .config = "{\"a\": \"\\u00e9\"}",
          .parameters = {{.name = "w \"\xc3\xa9\"",
                          .shape = {3, 4},
                          .trainable = true,
                          .group = "g",
                          .dtype = DType::kFloat32,
                          .states = {"exp_avg", "exp_avg_sq"}},
                         {.name = "scalar",
                          .shape = {},
                          .trainable = false,
                          .group = "",
                          .dtype = DType::kBFloat16,
                          .states = {}}},
          .files = {{.bytes = 5000,
                     .header_checksum = 0xfedcba9876543210,
                     .slice_checksums = {0x0123456789abcdef, 7}},
                    {.bytes = 4096, .header_checksum = 0}},
          .trainer = {{"place", std::string("\0\xff\x01", 3)}, {"empty", ""}}};
}

TEST(ManifestTest, ReadsBackWhatItWrote) {
  ASSERT_OK_AND_ASSIGN(const auto read, ParseManifest(ToText(Example()), "manifest.json"));
  EXPECT_EQ(read, Example());
}

TEST(ManifestTest, AManifestWithoutARunOrAReductionGroupIsRead) {
  Manifest older = Example();
  older.run.clear();
  older.reduction_group = 0;
  const std::string text = ToText(older);
  EXPECT_EQ(text.find("\"run\""), std::string::npos);
  EXPECT_EQ(text.find("reduction_group"), std::string::npos);
  ASSERT_OK_AND_ASSIGN(const auto read, ParseManifest(text, "manifest.json"));
  EXPECT_EQ(read, older);
}

// Parsed into a tree, such a text would take many times its size.
TEST(ManifestTest, TooManyValuesAreRefused) {
  std::string text = "{\"checksum\": \"0000000000000000\", \"a\": [1";
  for (int64_t i = 0; i < kJsonValuesMax; ++i) text += ",1";
  text += "]}";
  const uint64_t checksum = optim::Checksum(std::as_bytes(std::span(text)));
  text.replace(text.find("0000"), 16, absl::StrFormat("%016x", checksum));
  const auto read = ParseManifest(text, "manifest.json");
  EXPECT_THAT(read.status(), StatusIs(absl::StatusCode::kDataLoss, "has too many values"));
}

// Manifests without checksums of slices, as older versions wrote them.
TEST(ManifestTest, OneWithoutSliceChecksumsIsRead) {
  std::string text = ToText(Example());
  const std::string key = ",\n   \"slice_checksums\": \"";
  for (size_t at; (at = text.find(key)) != std::string::npos;)
    text.erase(at, text.find('"', at + key.size()) + 1 - at);
  const size_t digits = text.find("\"checksum\": \"") + 13;
  text.replace(digits, 16, std::string(16, '0'));
  text.replace(digits, 16,
               absl::StrFormat("%016x", optim::Checksum(std::as_bytes(std::span(text)))));
  ASSERT_OK_AND_ASSIGN(const auto read, ParseManifest(text, "manifest.json"));
  Manifest older = Example();
  older.files[0].slice_checksums.clear();
  EXPECT_EQ(read, older);
}

TEST(ManifestTest, OneChangedBitIsNoticedWhereverItIs) {
  const std::string text = ToText(Example());
  for (size_t byte = 0; byte < text.size(); ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = text;
      changed[byte] = static_cast<char>(changed[byte] ^ (1 << bit));
      const auto read = ParseManifest(changed, "manifest.json");
      EXPECT_FALSE(read.ok()) << "bit " << bit << " of byte " << byte;
    }
  }
}

// The examples of docs/format.md, with which a reader can check itself.
TEST(ManifestTest, ChecksumsFollowTheFormatsDescription) {
  const auto checksum = [](const std::string& text) {
    return optim::Checksum(std::as_bytes(std::span(text)));
  };
  std::string many(100'000, '\0');
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<char>(i % 251);
  EXPECT_EQ(checksum(""), 0u);
  EXPECT_EQ(checksum("abc"), 0xb0e1a7afb88d9efcu);
  EXPECT_EQ(checksum(many), 0x8f0d79940f2caa31u);
}

TEST(ManifestTest, ACutManifestIsNoticed) {
  const std::string text = ToText(Example());
  for (size_t bytes = 0; bytes + 1 < text.size(); ++bytes)
    EXPECT_FALSE(ParseManifest(text.substr(0, bytes), "manifest.json").ok()) << bytes;
}

TEST(ManifestTest, AnotherVersionIsNamed) {
  std::string text = ToText(Example());
  text.replace(text.find("\"version\": 1"), 12, "\"version\": 4");
  const size_t digits = text.find("\"checksum\": \"") + 13;
  text.replace(digits, 16, std::string(16, '0'));
  const uint64_t checksum = optim::Checksum(std::as_bytes(std::span(text)));
  text.replace(digits, 16, absl::StrFormat("%016x", checksum));
  const auto read = ParseManifest(text, "manifest.json");
  EXPECT_THAT(read.status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, "version 4, this is version 3"));
}

// The checksum holds in each, as in files of another program.
TEST(ManifestTest, AParameterThatIsCutAsItCannotBeIsDamage) {
  Manifest manifest = Example();
  Manifest::Parameter& cut = manifest.parameters.front();
  cut.shape = {6, 4};
  cut.blocks = 2;
  cut.split = {.dimension = 1};
  manifest.files.resize(2);
  EXPECT_EQ(*ParseManifest(ToText(manifest), "there"), manifest);
  EXPECT_NE(ToText(manifest).find("\"version\": 3"), std::string::npos);
  const auto refused = [&](Split split, int blocks) {
    Manifest changed = manifest;
    changed.parameters.front().split = std::move(split);
    changed.parameters.front().blocks = blocks;
    EXPECT_THAT(ParseManifest(ToText(changed), "there").status(),
                StatusIs(absl::StatusCode::kDataLoss, "there"));
  };
  refused({.dimension = 2}, 2);
  refused({.dimension = 1, .parts = {3, 2}}, 2);
  refused({.dimension = 1, .parts = {5, -1}}, 2);
  refused({.dimension = 1, .multiple = 3}, 2);
  refused({.dimension = 1, .multiple = 0}, 2);
  refused({.dimension = 1, .sizes = {4}}, 2);
  refused({.dimension = 1}, 3);  // blocks without files
  refused({.dimension = 1, .multiple = 4}, 2);
}

}  // namespace
}  // namespace ebb::testing::manifest_test
