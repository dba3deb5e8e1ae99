// Text that is no configuration: there is always an answer and never a crash, and an accepted
// configuration can be written and read again. Under the sanitizers this is a small, reproducible
// fuzzer.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/keys.h"
#include "fuzz_config.h"
#include "gtest/gtest.h"

namespace ebb::garbage_test {
namespace {

class Chance {
 public:
  explicit Chance(uint64_t seed) : generator_(seed) {}
  size_t Below(size_t end) { return std::uniform_int_distribution<size_t>(0, end - 1)(generator_); }

 private:
  std::mt19937_64 generator_;
};

// Aborts, with the text, if a law does not hold.
void Survives(const std::string& text) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(text.data()), text.size());
}

// The files of tests/config/corpus, in one order.
std::vector<std::string> Corpus() {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(EBB_CORPUS)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> texts;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    texts.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return texts;
}

TEST(Garbage, EveryFileOfTheCorpusIsReadOrRefusedAlsoIfCut) {
  const std::vector<std::string> corpus = Corpus();
  ASSERT_GT(corpus.size(), 10u);
  for (const std::string& text : corpus) {
    Survives(text);
    for (size_t length = 0; length < text.rfind('}'); length += 7) {
      EXPECT_FALSE(Config::FromJson(text.substr(0, length)).ok()) << text.substr(0, length);
    }
  }
}

TEST(Garbage, MutatedFilesKeepTheInvariants) {
  const std::vector<std::string> corpus = Corpus();
  constexpr char kBytes[] = "{}[]\",:\\/*#\n .-+eE0159ntf\x00\x01\x7f\x80\xc3\xff";
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    Chance chance(seed);
    std::string text = corpus[chance.Below(corpus.size())];
    const std::string& other = corpus[chance.Below(corpus.size())];
    for (size_t i = 1 + chance.Below(4); i > 0; --i) {
      const size_t at = chance.Below(text.size());
      const char byte = kBytes[chance.Below(sizeof(kBytes))];
      switch (chance.Below(4)) {
        case 0:
          text[at] = byte;
          break;
        case 1:
          text.insert(at, 1, byte);
          break;
        case 2:
          text.erase(at, 1 + chance.Below(8));
          break;
        case 3:
          text.insert(at, other.substr(chance.Below(other.size()), chance.Below(40)));
          break;
      }
    }
    Survives(text);
  }
}

TEST(Garbage, RandomBytesKeepTheInvariants) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Chance chance(seed);
    std::string text(chance.Below(300), '\0');
    for (char& byte : text) byte = static_cast<char>(chance.Below(256));
    Survives(text);
    Survives("{\"" + text);
  }
}

// Well-formed, with every key of the table and values of every kind.
TEST(Garbage, EveryKeyWithEveryKindOfValueKeepsTheInvariants) {
  const std::vector<std::string> values = absl::StrSplit(
      R"(null true 0 1 -1 0.5 5e8 1e300 -1e300 1e-320 9223372036854775807 18446744073709551615 1e19
         "" "auto" "all" "fp16" "1e3" "\u0000" [] [0.1,0.2] [[]]
         {} {"enabled":true} {"type":"SGD"} {"x":{"y":[{}]}})",
      absl::ByAnyChar(" \n"), absl::SkipEmpty());
  std::vector<std::string> paths;
  for (const config::Key& key : config::Keys()) paths.emplace_back(key.path);
  for (const config::WithoutMeaning& without : config::KeysWithoutMeaning()) {
    config::ForEachWord(without.names, [&](std::string_view name) {
      paths.push_back(std::string(without.block) + std::string(name));
    });
  }
  for (const std::string& whole : paths) {
    for (std::string text : values) {
      std::string path(whole);
      for (size_t dot; (dot = path.rfind('.')) != std::string::npos; path.resize(dot)) {
        text = "{\"" + path.substr(dot + 1) + "\":" + text + "}";
      }
      Survives("{\"" + path + "\":" + text + "}");
    }
  }
}

// Random combinations of keys, so that relations between them also see odd values.
TEST(Garbage, RandomCombinationsOfParametersKeepTheInvariants) {
  const std::vector<std::string> values = {"0",         "1",       "0.5",      "2",
                                           "true",      "false",   "\"auto\"", "7e3",
                                           "[0.5,0.5]", "\"log\"", "null",     "-1"};
  const std::vector<std::string> types = {
      "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest", "Adam", "AdamW",
      "SGD",      "Lion",          "Adagrad",        "RMSprop",  "Lamb",        "Lars", "Muon"};
  int accepted = 0;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    Chance chance(seed);
    const bool is_optimizer = chance.Below(2) == 0;
    const std::string block = is_optimizer ? "optimizer" : "scheduler";
    const std::string type = types[is_optimizer ? 5 + chance.Below(8) : chance.Below(5)];
    std::string params;
    for (const config::Key& key : config::Keys()) {
      if (!key.path.starts_with(block + ".params.") || chance.Below(4) != 0) continue;
      if (!key.only_for.empty() && !config::HasWord(key.only_for, type)) continue;
      params += (params.empty() ? "\"" : ",\"") + std::string(key.path.substr(block.size() + 8)) +
                "\":" + values[chance.Below(values.size())];
    }
    const std::string text =
        "{\"" + block + "\":{\"type\":\"" + type + "\",\"params\":{" + params + "}}}";
    Survives(text);
    accepted += Config::FromJson(text).ok() ? 1 : 0;
  }
  EXPECT_GT(accepted, 10) << "the combinations are too wild to test anything but refusals";
}

}  // namespace
}  // namespace ebb::garbage_test
