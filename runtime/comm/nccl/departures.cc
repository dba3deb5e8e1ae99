#include "ebb/runtime/comm/nccl/departures.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/rendezvous/connection.h"

namespace ebb {

std::string Departure::Pack() const {
  return Packer().Add(rank).Add(calls).Take();
}

std::optional<Departure> Departure::Unpack(std::string_view text) {
  Unpacker unpacker(text);
  Departure departure;
  departure.rank = unpacker.Text();
  departure.calls = unpacker.Number();
  if (!unpacker.ok()) return std::nullopt;
  return departure;
}

class DepartureNotes::Named : public Departures {
 public:
  Named(std::shared_ptr<DepartureNotes> notes, std::string name)
      : notes_(std::move(notes)), name_(std::move(name)) {}

  void Leave(const Departure& mine) override {
    notes_->Note(name_, mine);
    notes_->tell_(Packer().Add(name_).Add(mine.Pack()).Take());
  }

  std::optional<Departure> First() override {
    const std::scoped_lock lock(notes_->mutex_);
    const auto found = notes_->first_.find(name_);
    if (found == notes_->first_.end()) return std::nullopt;
    return found->second;
  }

  absl::StatusOr<std::unique_ptr<Departures>> Split(int colour, int /*key*/) override {
    return std::make_unique<Named>(notes_, absl::StrCat(name_, ".", splits_++, ":", colour));
  }

 private:
  const std::shared_ptr<DepartureNotes> notes_;
  const std::string name_;
  int splits_ = 0;
};

std::unique_ptr<Departures> DepartureNotes::New() {
  const std::scoped_lock lock(mutex_);
  return std::make_unique<Named>(shared_from_this(), absl::StrCat(made_++));
}

void DepartureNotes::Hear(std::string_view note) {
  Unpacker unpacker(note);
  const std::string name = unpacker.Text();
  std::optional<Departure> departure = Departure::Unpack(unpacker.Text());
  if (unpacker.ok() && departure.has_value()) Note(name, *std::move(departure));
}

void DepartureNotes::Note(const std::string& name, Departure departure) {
  const std::scoped_lock lock(mutex_);
  first_.emplace(name, std::move(departure));
}

}  // namespace ebb
