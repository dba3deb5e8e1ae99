// One rank keeps departures from communicators as long as it needs them, and no longer.
#include "ebb/runtime/comm/rendezvous/departures.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

namespace ebb {
namespace {

// Two ranks; texts arrive when Deliver is called.
class DeparturesTest : public ::testing::Test {
 protected:
  void Leave(int rank, const std::string& name, uint64_t calls, int size = 2) {
    texts_.push_back({.to = 1 - rank,
                      .text = ranks_[static_cast<size_t>(rank)].Leave(
                          name, size, {.rank = "rank " + std::to_string(rank), .calls = calls})});
  }
  void Deliver() {
    for (const Text& text : texts_) ranks_[static_cast<size_t>(text.to)].Hear(text.text);
    texts_.clear();
  }

  struct Text {
    int to;
    std::string text;
  };
  std::vector<Text> texts_;
  std::array<Departures, 2> ranks_;
};

TEST_F(DeparturesTest, TheFirstDepartureStays) {
  EXPECT_FALSE(ranks_[0].First("a").has_value());
  Leave(1, "a", 7, /*size=*/3);
  Deliver();
  Leave(0, "a", 9, /*size=*/3);
  ASSERT_TRUE(ranks_[0].First("a").has_value());
  EXPECT_EQ(ranks_[0].First("a")->rank, "rank 1");
  EXPECT_EQ(ranks_[0].First("a")->calls, 7u);
  EXPECT_FALSE(ranks_[0].First("b").has_value());
}

// This rank may join them later or never.
TEST_F(DeparturesTest, DeparturesAreKeptUntilAllRanksHaveLeft) {
  for (const char* const name : {"whole", "whole.0:2", "whole.0:2.0:0"}) Leave(1, name, 3);
  Deliver();
  EXPECT_EQ(ranks_[0].known(), 3u);
  for (const char* const name : {"whole", "whole.0:2", "whole.0:2.0:0"}) {
    EXPECT_EQ(ranks_[0].First(name)->calls, 3u);
    Leave(0, name, 3);
    EXPECT_FALSE(ranks_[0].First(name).has_value());
  }
  EXPECT_EQ(ranks_[0].known(), 0u);
}

TEST_F(DeparturesTest, NothingIsKeptOnceAllRanksHaveLeft) {
  for (int i = 0; i < 100; ++i) {
    const std::string mine = std::to_string(i), part = mine + ".0:" + std::to_string(i % 2);
    for (const int rank : {0, 1}) {
      Leave(rank, part, 1, /*size=*/2);
      if (i % 2 == 0) Deliver();
      Leave(rank, mine, 1);
    }
    // A communicator of one rank alone, which the other never joined.
    Leave(i % 2, mine + ".1:0", 1, /*size=*/1);
    Deliver();
    EXPECT_EQ(ranks_[0].known(), 0u);
    EXPECT_EQ(ranks_[1].known(), 0u);
  }
  Leave(1, "stays", 5);
  Deliver();
  EXPECT_EQ(ranks_[0].First("stays")->calls, 5u);
}

TEST_F(DeparturesTest, TextsThatCannotBeReadAreIgnored) {
  for (const char* const text : {"", "departure", "a text that says nothing"}) ranks_[0].Hear(text);
  EXPECT_EQ(ranks_[0].known(), 0u);
}

}  // namespace
}  // namespace ebb
