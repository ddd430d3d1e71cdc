#include "tls.h"

#include <algorithm>
#include <cerrno>
#include <string_view>

#include "tls_library.h"

namespace stoker {
namespace {

// Numbers of OpenSSL's headers.
constexpr int CTRL_MODE = 33, CTRL_READ_AHEAD = 41, CTRL_SESSION_CACHE = 44, CTRL_MIN_VERSION = 123;
constexpr long MODE_PARTIAL_WRITE = 1, MODE_MOVING_BUFFER = 2, MODE_RELEASE_BUFFERS = 16;
constexpr long TLS_1_2 = 0x0303;
constexpr uint64_t OP_NO_RENEGOTIATION = uint64_t{1} << 30;
// Whether all has come the length of a body says: many peers close without a word.
constexpr uint64_t OP_IGNORE_UNEXPECTED_EOF = uint64_t{1} << 7;
constexpr int PEM = 1;
constexpr int VERIFY_PEER = 1, VERIFY_FAIL_IF_NONE = 2;
constexpr int ERROR_SSL = 1, ERROR_WANT_READ = 2, ERROR_WANT_WRITE = 3, ERROR_SYSCALL = 5, ERROR_ZERO_RETURN = 6;
constexpr unsigned long REASON_HTTP_REQUEST = 156, REASONS = 0xFFF;
constexpr int ALPN_OK = 0, ALPN_NONE = 3, ALPN_NEGOTIATED = 1;
constexpr int NAME_DNS = 2, NAME_URI = 6;
constexpr int COMMON_NAME = 13, ALTERNATIVE_NAMES = 85;
constexpr size_t NAME_BYTES_MAX = 1024;

std::string why() {
  const TlsLibrary& ssl = TlsLibrary::get();
  char text[256] = "";
  const unsigned long error = ssl.ERR_get_error();
  if (error) ssl.ERR_error_string_n(error, text, sizeof text);
  ssl.ERR_clear_error();
  const std::string_view said = text;
  const size_t last = said.rfind(':');
  return std::string(last == std::string_view::npos ? said : said.substr(last + 1));
}

// A key that is encrypted is refused: nobody is there to be asked for a password.
int no_password(char*, int, int, void*) { return 0; }

int choose_protocol(void*, const unsigned char** chosen, unsigned char* size, const unsigned char* theirs,
                    unsigned int theirs_size, void*) {
  static constexpr unsigned char OURS[] = "\x08http/1.1";
  unsigned char* found = nullptr;
  const int done = TlsLibrary::get().SSL_select_next_proto(&found, size, OURS, sizeof OURS - 1, theirs, theirs_size);
  if (done != ALPN_NEGOTIATED) return ALPN_NONE;
  *chosen = found;
  return ALPN_OK;
}

// Nothing where there are bytes in it that no name has: what stands behind a NUL would be lost to some who compare names.
std::string checked(const char* kind, const unsigned char* bytes, int size) {
  if (!bytes || size <= 0 || static_cast<size_t>(size) > NAME_BYTES_MAX) return {};
  if (std::any_of(bytes, bytes + size, [](unsigned char byte) { return byte < 0x20 || byte == 0x7F; })) return {};
  return kind + std::string(reinterpret_cast<const char*>(bytes), static_cast<size_t>(size));
}

std::string alternative_name(const TlsLibrary& ssl, const void* names, int wanted, const char* kind) {
  for (int i = 0; i < ssl.OPENSSL_sk_num(names); ++i) {
    int type = 0;
    const void* value = ssl.GENERAL_NAME_get0_value(ssl.OPENSSL_sk_value(names, i), &type);
    if (type == wanted && value) return checked(kind, ssl.ASN1_STRING_get0_data(value), ssl.ASN1_STRING_length(value));
  }
  return {};
}

std::string common_name(const TlsLibrary& ssl, const void* certificate) {
  const void* name = ssl.X509_get_subject_name(certificate);
  const int at = ssl.X509_NAME_get_index_by_NID(name, COMMON_NAME, -1);
  if (at < 0 || ssl.X509_NAME_get_index_by_NID(name, COMMON_NAME, at) >= 0) return {};  // none, or which of them?
  unsigned char* bytes = nullptr;
  const int size = ssl.ASN1_STRING_to_UTF8(&bytes, ssl.X509_NAME_ENTRY_get_data(ssl.X509_NAME_get_entry(name, at)));
  const std::string found = checked("CN:", bytes, size);
  if (bytes) ssl.CRYPTO_free(bytes, "", 0);
  return found;
}

std::string name_of(const TlsLibrary& ssl, const void* certificate) {
  std::string found;
  if (void* names = ssl.X509_get_ext_d2i(certificate, ALTERNATIVE_NAMES, nullptr, nullptr)) {
    found = alternative_name(ssl, names, NAME_URI, "URI:");
    if (found.empty()) found = alternative_name(ssl, names, NAME_DNS, "DNS:");
    ssl.GENERAL_NAMES_free(names);
  }
  return found.empty() ? common_name(ssl, certificate) : found;
}

}  // namespace

TlsContext::TlsContext(const std::string& certificate, const std::string& key, const std::string& client_ca,
                       bool is_client_required) {
  if (is_client_required && client_ca.empty()) throw TlsProblem("nobody signs the certificates that clients must have");
  const TlsLibrary& ssl = TlsLibrary::get();
  ssl.ERR_clear_error();
  context_ = ssl.SSL_CTX_new(ssl.TLS_server_method());
  if (!context_) throw TlsProblem("TLS cannot be set up: " + why());
  const auto need = [&](bool is_done, const std::string& what) {
    if (is_done) return;
    const std::string said = what + ": " + why();
    ssl.SSL_CTX_free(context_);
    throw TlsProblem(said);
  };
  ssl.SSL_CTX_ctrl(context_, CTRL_MIN_VERSION, TLS_1_2, nullptr);
  ssl.SSL_CTX_ctrl(context_, CTRL_MODE, MODE_PARTIAL_WRITE | MODE_MOVING_BUFFER | MODE_RELEASE_BUFFERS, nullptr);
  ssl.SSL_CTX_ctrl(context_, CTRL_READ_AHEAD, 1, nullptr);
  ssl.SSL_CTX_ctrl(context_, CTRL_SESSION_CACHE, 0, nullptr);  // peers keep theirs, as tickets
  ssl.SSL_CTX_set_options(context_, OP_NO_RENEGOTIATION | OP_IGNORE_UNEXPECTED_EOF);
  ssl.SSL_CTX_set_default_passwd_cb(context_, no_password);
  ssl.SSL_CTX_set_alpn_select_cb(context_, choose_protocol, nullptr);
  need(ssl.SSL_CTX_use_certificate_chain_file(context_, certificate.c_str()) == 1,
       certificate + " holds no chain of certificates");
  need(ssl.SSL_CTX_use_PrivateKey_file(context_, key.c_str(), PEM) == 1,
       key + " holds no private key that can be used without a password, of the certificate in " + certificate);
  need(ssl.SSL_CTX_check_private_key(context_) == 1, key + " is not the key of the certificate in " + certificate);
  if (client_ca.empty()) return;
  need(ssl.SSL_CTX_load_verify_locations(context_, client_ca.c_str(), nullptr) == 1,
       client_ca + " holds no certificates");
  void* names = ssl.SSL_load_client_CA_file(client_ca.c_str());
  need(names != nullptr, client_ca + " holds no certificates");
  ssl.SSL_CTX_set_client_CA_list(context_, names);
  // Who shows none is let in unless one is required.
  ssl.SSL_CTX_set_verify(context_, VERIFY_PEER | (is_client_required ? VERIFY_FAIL_IF_NONE : 0), nullptr);
  static constexpr unsigned char ID[] = "stoker";
  ssl.SSL_CTX_set_session_id_context(context_, ID, sizeof ID - 1);
}

TlsContext::~TlsContext() { TlsLibrary::get().SSL_CTX_free(context_); }

std::unique_ptr<TlsSession> TlsContext::accept(int socket) const {
  const TlsLibrary& ssl = TlsLibrary::get();
  void* session = ssl.SSL_new(context_);
  if (!session) {
    ssl.ERR_clear_error();
    return nullptr;
  }
  auto made = std::make_unique<TlsSession>(session);
  if (ssl.SSL_set_fd(session, socket) != 1) return nullptr;
  ssl.SSL_set_accept_state(session);
  return made;
}

TlsSession::~TlsSession() { TlsLibrary::get().SSL_free(session_); }

ssize_t TlsSession::read(char* bytes, size_t size) {
  if (is_broken_) {
    errno = EPROTO;
    return -1;
  }
  const TlsLibrary& ssl = TlsLibrary::get();
  ssl.ERR_clear_error();
  errno = 0;
  return result(ssl.SSL_read(session_, bytes, static_cast<int>(std::min<size_t>(size, 1 << 30))));
}

ssize_t TlsSession::write(const char* bytes, size_t size) {
  if (is_broken_) {
    errno = EPIPE;
    return -1;
  }
  const TlsLibrary& ssl = TlsLibrary::get();
  ssl.ERR_clear_error();
  errno = 0;
  const size_t wanted = begun_bytes_ ? begun_bytes_ : std::min(size, RECORD_BYTES);
  const ssize_t done = result(ssl.SSL_write(session_, bytes, static_cast<int>(wanted)));
  begun_bytes_ = 0;
  if (done > 0) return done;
  if (done < 0 && errno == EAGAIN) begun_bytes_ = wanted;
  else errno = EPIPE;
  return -1;
}

ssize_t TlsSession::result(int done) {
  const TlsLibrary& ssl = TlsLibrary::get();
  const int number = errno;
  // It looks at the queue of errors: nothing else may be called before that.
  const int error = done > 0 ? 0 : ssl.SSL_get_error(session_, done);
  const bool is_plain = error == ERROR_SSL && (ssl.ERR_peek_last_error() & REASONS) == REASON_HTTP_REQUEST;
  if (!is_open_ && ssl.SSL_is_init_finished(session_)) open();
  ssl.ERR_clear_error();
  if (is_broken_) {
    errno = EPROTO;
    return -1;
  }
  if (done > 0) return done;
  if (error == ERROR_WANT_READ || error == ERROR_WANT_WRITE) {
    errno = EAGAIN;
    return -1;
  }
  if (error == ERROR_ZERO_RETURN || (error == ERROR_SYSCALL && number == 0)) return 0;
  is_broken_ = true;
  met_plaintext_ = is_plain;
  errno = error == ERROR_SYSCALL ? number : EPROTO;
  return -1;
}

void TlsSession::open() {
  const TlsLibrary& ssl = TlsLibrary::get();
  is_open_ = true;
  void* certificate = ssl.SSL_get1_peer_certificate(session_);
  if (!certificate) return;
  if (ssl.SSL_get_verify_result(session_) == 0) peer_ = name_of(ssl, certificate);
  else is_broken_ = true;
  ssl.X509_free(certificate);
}

bool TlsSession::end() {
  if (!is_open_ || is_broken_) return true;
  const TlsLibrary& ssl = TlsLibrary::get();
  ssl.ERR_clear_error();
  const int done = ssl.SSL_shutdown(session_);
  const bool waits = done < 0 && ssl.SSL_get_error(session_, done) == ERROR_WANT_WRITE;
  ssl.ERR_clear_error();
  return !waits;
}

}  // namespace stoker
