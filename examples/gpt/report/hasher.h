// A hash (FNV-1a, 64 bits) that is the same on every machine. It compares options between ranks,
// and the text of a run with the text of a checkpoint.
#pragma once

#include <cstdint>
#include <string_view>

namespace ebb::gpt {

class Hasher {
 public:
  Hasher& Add(std::string_view bytes) {
    Add(static_cast<int64_t>(bytes.size()));
    for (const char c : bytes) Mix(static_cast<unsigned char>(c));
    return *this;
  }
  Hasher& Add(int64_t value) {
    for (int i = 0; i < 8; ++i)
      Mix(static_cast<unsigned char>(static_cast<uint64_t>(value) >> (8 * i)));
    return *this;
  }
  uint64_t hash() const { return hash_; }

 private:
  void Mix(unsigned char byte) { hash_ = (hash_ ^ byte) * 0x100000001b3ull; }
  uint64_t hash_ = 0xcbf29ce484222325ull;
};

}  // namespace ebb::gpt
