// Who signed a request (AWS Signature, version 4), as far as its head tells.
#pragma once

#include <string>

#include "access.h"
#include "http.h"
#include "sha256.h"

namespace stoker {

// Whether a request says that it is signed, in its head or in its query.
bool is_signed(const Head& head);

// Remembers the last key that was derived, as most connections are of one client.
class Signatures {
 public:
  // The number of the token that signed a request without a body, of which the time is `now_s`, seconds since 1970.
  // UNPROVEN where it is not proved here: what is unusual is left to the back, which refuses what is wrong.
  int principal(const Rules& rules, const Head& head, int64_t now_s);
  // The secrets are others.
  void forget() { scope_.clear(); }

 private:
  const Digest& key(std::string_view credential, const std::string& secret);

  std::string scope_;  // with the access key: what `key_` is of
  Digest key_{};
  std::string text_;  // that is put together
};

}  // namespace stoker
