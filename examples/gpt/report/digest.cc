#include "report/digest.h"

#include <openssl/evp.h>

#include <bit>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "status_macros.h"

namespace ebb::gpt {

static_assert(std::endian::native == std::endian::little,
              "numbers are hashed as they lie in memory");

ParameterDigest::ParameterDigest() : context_(EVP_MD_CTX_new(), &EVP_MD_CTX_free) {
  EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr);
}

void ParameterDigest::Begin(std::string_view name, std::span<const int64_t> shape) {
  constexpr char kZero = 0;
  EVP_DigestUpdate(context_.get(), name.data(), name.size());
  EVP_DigestUpdate(context_.get(), &kZero, 1);
  EVP_DigestUpdate(context_.get(), shape.data(), shape.size_bytes());
}

void ParameterDigest::Add(std::span<const float> values) {
  EVP_DigestUpdate(context_.get(), values.data(), values.size_bytes());
}

std::string ParameterDigest::Finish() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  EVP_DigestFinal_ex(context_.get(), digest, &size);
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(digest), size));
}

absl::StatusOr<std::string> DigestOf(Engine& engine, const ModelSpec& model, int rank) {
  ParameterDigest digest;
  const auto add = [&](const Slice&, std::span<const float> values) {
    digest.Add(values);
    return absl::OkStatus();
  };
  for (size_t i = 0; i < model.parameters.size(); ++i) {
    const ParameterSpec& parameter = model.parameters[i];
    if (rank == 0) digest.Begin(parameter.name, parameter.shape);
    GPT_RETURN_IF_ERROR(
        engine.Gather(static_cast<ParameterId>(i), StateClass::kMaster, add, /*root=*/0));
  }
  return rank == 0 ? digest.Finish() : std::string();
}

}  // namespace ebb::gpt
