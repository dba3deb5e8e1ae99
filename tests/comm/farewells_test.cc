// What one rank remembers of those that have left communicators: enough, and no longer than it needs.
#include "ebb/runtime/comm/farewells.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace ebb {
namespace {

// Two ranks; texts arrive when Deliver is called.
class FarewellsTest : public ::testing::Test {
 protected:
  struct Text {
    int to;
    std::string note;
  };

  std::shared_ptr<FarewellNotes> NotesOf(int rank) {
    return std::make_shared<FarewellNotes>([this, rank](std::string_view note) {
      texts_.push_back({.to = 1 - rank, .note = std::string(note)});
    });
  }
  void Deliver() {
    for (const Text& text : texts_) ranks_[static_cast<size_t>(text.to)]->Hear(text.note);
    texts_.clear();
  }

  std::vector<Text> texts_;
  const std::array<std::shared_ptr<FarewellNotes>, 2> ranks_ = {NotesOf(0), NotesOf(1)};
};

TEST_F(FarewellsTest, TheFirstThatIsSaidStays) {
  const auto first = ranks_[0]->New(), second = ranks_[1]->New(), other = ranks_[0]->New();
  EXPECT_FALSE(first->First().has_value());
  second->Say({.rank = "rank 1", .calls = 7});
  Deliver();
  first->Say({.rank = "rank 0", .calls = 9});
  ASSERT_TRUE(first->First().has_value());
  EXPECT_EQ(first->First()->rank, "rank 1");
  EXPECT_EQ(first->First()->calls, 7u);
  EXPECT_FALSE(other->First().has_value());
}

// The other rank has made and left them already.
TEST_F(FarewellsTest, WhatIsSaidOfCommunicatorsThatAreToComeIsKept) {
  {
    const auto whole = ranks_[1]->New();
    const auto part = *whole->Split(2, 0);
    const auto of_part = *part->Split(0, 0);
    of_part->Say({.rank = "rank 1", .calls = 3});
    part->Say({.rank = "rank 1", .calls = 2});
    whole->Say({.rank = "rank 1", .calls = 1});
  }
  EXPECT_EQ(ranks_[1]->known(), 0u);
  Deliver();
  const auto whole = ranks_[0]->New();
  const auto part = *whole->Split(2, 0);
  const auto of_part = *part->Split(0, 0);
  EXPECT_EQ(whole->First()->calls, 1u);
  EXPECT_EQ(part->First()->calls, 2u);
  EXPECT_EQ(of_part->First()->calls, 3u);
}

TEST_F(FarewellsTest, NothingIsKeptOfCommunicatorsThatWereLeft) {
  const auto stays = ranks_[0]->New(), stays_too = ranks_[1]->New();
  for (int i = 0; i < 100; ++i) {
    auto mine = ranks_[0]->New(), other = ranks_[1]->New();
    auto part = *mine->Split(0, 0), other_part = *other->Split(1, 0);
    for (const auto* each : {&mine, &part, &other, &other_part})
      (*each)->Say({.rank = "a rank", .calls = 1});
    if (i % 2 == 0) Deliver();
    part.reset();
    mine.reset();
    other_part.reset();
    other.reset();
    Deliver();
    EXPECT_EQ(ranks_[0]->known(), 0u);
    EXPECT_EQ(ranks_[1]->known(), 0u);
  }
  stays_too->Say({.rank = "rank 1", .calls = 5});
  Deliver();
  EXPECT_EQ(stays->First()->calls, 5u);
}

TEST_F(FarewellsTest, TextsThatCannotBeReadArePassedOver) {
  const auto farewells = ranks_[0]->New();
  for (const char* const text : {"", "farewell", "a text that says nothing"}) ranks_[0]->Hear(text);
  EXPECT_EQ(ranks_[0]->known(), 0u);
}

}  // namespace
}  // namespace ebb
