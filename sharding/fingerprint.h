// Hashes of what all ranks must agree on before they train together. FNV-1a over the fields, 64
// bits: the same on every machine.
#pragma once

#include <cstdint>
#include <string_view>

#include "ebb/sharding/model.h"
#include "ebb/sharding/op_list.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

class Hasher {
 public:
  Hasher& Add(std::string_view bytes) {
    Add(static_cast<int64_t>(bytes.size()));
    for (char c : bytes) Mix(static_cast<unsigned char>(c));
    return *this;
  }
  Hasher& Add(int64_t value) {
    for (int i = 0; i < 8; ++i)
      Mix(static_cast<unsigned char>(static_cast<uint64_t>(value) >> (8 * i)));
    return *this;
  }
  void Mix(unsigned char byte) { hash_ = (hash_ ^ byte) * 0x100000001b3ull; }
  uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ull;
};

// Hash of one parameter's declaration, without its initialiser.
uint64_t Fingerprint(const ParameterSpec& parameter);
// Hash of units, visits and parameters.
uint64_t Fingerprint(const ModelSpec& model);
// Hash of what is decided, where everything lies, and what runs. Waits follow from that.
uint64_t Fingerprint(const Plan& plan);

}  // namespace ebb::sharding
