// The documents that are generated from the table of keys, and their files in the tree.
#include "ebb/runtime/config/keys_as_text.h"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "ebb/runtime/config/keys.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace ebb::config {
namespace {

using ::testing::HasSubstr;

// Checks that the file has the text. With EBB_WRITE_DOCUMENTS in the environment the file is
// written.
void ExpectFile(const std::string& path, const std::string& text) {
  if (std::getenv("EBB_WRITE_DOCUMENTS") != nullptr) std::ofstream(path, std::ios::binary) << text;
  std::ifstream file(path, std::ios::binary);
  const std::string found((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  EXPECT_TRUE(found == text) << path << " is not what the table of keys says; write it with\n"
                             << "EBB_WRITE_DOCUMENTS=1 build/release/bin/config_keys_as_text_test";
}

TEST(KeysAsText, TheCommittedFilesMatchTheTable) {
  ExpectFile(EBB_SOURCE "/docs/configuration.md", KeysAsMarkdown());
  ExpectFile(EBB_SOURCE "/runtime/config/ebb-config.schema.json", KeysAsSchema());
}

TEST(KeysAsText, EveryKeyIsInBoth) {
  const std::string markdown = KeysAsMarkdown();
  const nlohmann::json schema = nlohmann::json::parse(KeysAsSchema());
  const auto expect = [&](std::string_view path) {
    const std::string name(path.substr(path.rfind('.') + 1));
    EXPECT_THAT(markdown, HasSubstr(name)) << path;
    nlohmann::json place = schema;
    while (!path.empty()) {
      const std::string part(path.substr(0, path.find('.')));
      place = part == "*" ? place["additionalProperties"] : place["properties"][part];
      path.remove_prefix(std::min(path.size(), part.size() + 1));
    }
    EXPECT_TRUE(place.contains("description")) << name;
  };
  for (const Key& key : Keys()) expect(key.path);
  for (const WithoutMeaning& without : KeysWithoutMeaning()) {
    ForEachWord(without.names, [&](std::string_view name) {
      expect(std::string(without.block) + std::string(name));
    });
  }
}

}  // namespace
}  // namespace ebb::config
