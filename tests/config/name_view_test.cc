#include "ebb/runtime/base/name_view.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"

namespace ebb::name_view_test {
namespace {

TEST(NameView, ConvertsForAbslStrCatAndForStdStringView) {
  const std::string held = "layer0.weight";
  const NameView name = held;
  EXPECT_EQ(absl::StrCat("<", name, ">"), "<layer0.weight>");
  const std::string_view standard = name;
  EXPECT_EQ(standard.data(), held.data());
  EXPECT_EQ(standard.size(), held.size());
  EXPECT_EQ(std::string(name), held);
  EXPECT_TRUE(name.starts_with("layer0"));
  EXPECT_TRUE(name.ends_with(".weight"));
  EXPECT_FALSE(name.starts_with("weight"));
}

TEST(NameView, ComparesWithEveryKindOfString) {
  const NameView name = std::string_view("norm");
  EXPECT_TRUE(name == "norm");
  EXPECT_TRUE(name == std::string("norm"));
  EXPECT_TRUE(name == std::string_view("norm"));
  EXPECT_TRUE(name == NameView("norm"));
  EXPECT_TRUE(name != "head");
  EXPECT_TRUE(name >= "norm");
  const std::map<std::string, int, std::less<>> ranks = {{"head", 1}, {"norm", 2}};
  EXPECT_EQ(ranks.find(name)->second, 2);
  EXPECT_TRUE(NameView().empty());
}

}  // namespace
}  // namespace ebb::name_view_test
