#include "ebb/runtime/comm/farewells.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/rendezvous/connection.h"

namespace ebb {

std::string Farewell::Pack() const {
  return Packer().Add(rank).Add(calls).Take();
}

std::optional<Farewell> Farewell::Unpack(std::string_view text) {
  Unpacker unpacker(text);
  Farewell farewell;
  farewell.rank = unpacker.Text();
  farewell.calls = unpacker.Number();
  if (!unpacker.ok()) return std::nullopt;
  return farewell;
}

// Names: "2", the third that was made; "2.0:1", the part of colour 1 of its first split.
class FarewellNotes::Named : public Farewells {
 public:
  // Which has begun.
  Named(std::shared_ptr<FarewellNotes> notes, std::string name)
      : notes_(std::move(notes)), name_(std::move(name)) {}
  ~Named() override {
    const std::scoped_lock lock(notes_->mutex_);
    notes_->End(name_);
  }

  void Say(const Farewell& mine) override {
    notes_->Note(name_, mine);
    notes_->tell_(Packer().Add(name_).Add(mine.Pack()).Take());
  }

  std::optional<Farewell> First() override {
    const std::scoped_lock lock(notes_->mutex_);
    const auto found = notes_->first_.find(name_);
    if (found == notes_->first_.end()) return std::nullopt;
    return found->second;
  }

  absl::StatusOr<std::unique_ptr<Farewells>> Split(int colour, int /*key*/) override {
    const std::scoped_lock lock(notes_->mutex_);
    std::string name = absl::StrCat(name_, ".", notes_->here_[name_]++, ":", colour);
    notes_->Begin(name);
    return std::make_unique<Named>(notes_, std::move(name));
  }

 private:
  const std::shared_ptr<FarewellNotes> notes_;
  const std::string name_;
};

std::unique_ptr<Farewells> FarewellNotes::New() {
  const std::scoped_lock lock(mutex_);
  std::string name = absl::StrCat(made_++);
  Begin(name);
  return std::make_unique<Named>(shared_from_this(), std::move(name));
}

void FarewellNotes::Hear(std::string_view note) {
  Unpacker unpacker(note);
  const std::string name = unpacker.Text();
  std::optional<Farewell> farewell = Farewell::Unpack(unpacker.Text());
  if (unpacker.ok() && farewell.has_value()) Note(name, *std::move(farewell));
}

size_t FarewellNotes::known() {
  const std::scoped_lock lock(mutex_);
  return first_.size();
}

void FarewellNotes::Note(const std::string& name, Farewell farewell) {
  const std::scoped_lock lock(mutex_);
  if (IsHereOrToCome(name)) first_.emplace(name, std::move(farewell));
}

void FarewellNotes::Begin(const std::string& name) {
  here_[name] = 0;
  ForgetOthers();
}

void FarewellNotes::End(const std::string& name) {
  here_.erase(name);
  ForgetOthers();
}

// What is neither here nor to come, this rank has left already or has never been in.
bool FarewellNotes::IsHereOrToCome(const std::string& name) const {
  if (here_.contains(name)) return true;
  int number = 0;
  const size_t dot = name.rfind('.');
  if (dot == std::string::npos) return absl::SimpleAtoi(name, &number) && number >= made_;
  const std::string whole = name.substr(0, dot);
  const size_t colon = name.find(':', dot);
  if (colon == std::string::npos ||
      !absl::SimpleAtoi(name.substr(dot + 1, colon - dot - 1), &number))
    return false;
  const auto split = here_.find(whole);
  return split == here_.end() ? IsHereOrToCome(whole) : number >= split->second;
}

void FarewellNotes::ForgetOthers() {
  std::erase_if(first_, [this](const auto& entry) { return !IsHereOrToCome(entry.first); });
}

}  // namespace ebb
