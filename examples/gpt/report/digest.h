// SHA-256 over a model's parameters. Two runs have the same digest if their parameters have the
// same bits, at any stage, number of ranks and tier.
//
// The bytes, for every parameter in declared order:
//   the name, then one zero byte
//   each dimension as a 64-bit integer
//   each fp32 master value, row-major
// Numbers are little-endian.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/engine/engine.h"
#include "ebb/sharding/model.h"

struct evp_md_ctx_st;  // OpenSSL's EVP_MD_CTX

namespace ebb::gpt {

class ParameterDigest {
 public:
  ParameterDigest();

  void Begin(std::string_view name, std::span<const int64_t> shape);
  void Add(std::span<const float> values);  // of the parameter that was begun last, in any pieces
  std::string Finish();                     // hexadecimal; once

 private:
  std::unique_ptr<evp_md_ctx_st, void (*)(evp_md_ctx_st*)> context_;
};

// A hash (FNV-1a, 64 bits) that is the same on every machine. It compares options between ranks,
// and the text of a run with the text of a checkpoint.
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

// Collective. Gathers parameters piece by piece to rank 0, which gets the digest; others get "".
absl::StatusOr<std::string> DigestOf(Engine& engine, const ModelSpec& model, int rank);

}  // namespace ebb::gpt
