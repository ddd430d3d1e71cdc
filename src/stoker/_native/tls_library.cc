#include "tls_library.h"

#include <dlfcn.h>

#include <string>

#include "tls.h"

namespace stoker {
namespace {

// A Python that has an OpenSSL of its own built in must not lend parts of it to this one. Sanitizers know no such scopes.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(RTLD_DEEPBIND)
constexpr int OWN_SCOPE = 0;
#else
constexpr int OWN_SCOPE = RTLD_DEEPBIND;
#endif

void* open_library() {
  std::string why;
  for (const char* name : {"libssl.so.3", "libssl.so.1.1"}) {
    if (void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL | OWN_SCOPE)) return library;
    if (why.empty()) why = ::dlerror();
  }
  throw TlsProblem("TLS needs OpenSSL 3 or 1.1 (libssl.so.3: the package libssl3 or openssl-libs): " + why);
}

template <typename Function>
void find(void* library, Function*& function, const char* name, const char* former = nullptr) {
  void* found = ::dlsym(library, name);
  if (!found && former) found = ::dlsym(library, former);
  if (!found) throw TlsProblem(std::string("TLS needs OpenSSL 3 or 1.1, and what is here has no ") + name);
  function = reinterpret_cast<Function*>(found);
}

TlsLibrary load() {
  void* from = open_library();
  TlsLibrary it{};
#define FIND(name) find(from, it.name, #name)
  FIND(TLS_server_method);
  FIND(SSL_CTX_new);
  FIND(SSL_CTX_free);
  FIND(SSL_CTX_ctrl);
  FIND(SSL_CTX_set_options);
  FIND(SSL_CTX_set_default_passwd_cb);
  FIND(SSL_CTX_use_certificate_chain_file);
  FIND(SSL_CTX_use_PrivateKey_file);
  FIND(SSL_CTX_check_private_key);
  FIND(SSL_CTX_load_verify_locations);
  FIND(SSL_load_client_CA_file);
  FIND(SSL_CTX_set_client_CA_list);
  FIND(SSL_CTX_set_verify);
  FIND(SSL_CTX_set_session_id_context);
  FIND(SSL_CTX_set_alpn_select_cb);
  FIND(SSL_select_next_proto);
  FIND(SSL_new);
  FIND(SSL_free);
  FIND(SSL_set_fd);
  FIND(SSL_set_accept_state);
  FIND(SSL_read);
  FIND(SSL_write);
  FIND(SSL_shutdown);
  FIND(SSL_get_error);
  FIND(SSL_is_init_finished);
  FIND(SSL_get_verify_result);
  FIND(ERR_get_error);
  FIND(ERR_peek_last_error);
  FIND(ERR_clear_error);
  FIND(ERR_error_string_n);
  FIND(X509_free);
  FIND(X509_get_ext_d2i);
  FIND(X509_get_subject_name);
  FIND(X509_NAME_get_index_by_NID);
  FIND(X509_NAME_get_entry);
  FIND(X509_NAME_ENTRY_get_data);
  FIND(OPENSSL_sk_num);
  FIND(OPENSSL_sk_value);
  FIND(GENERAL_NAME_get0_value);
  FIND(GENERAL_NAMES_free);
  FIND(ASN1_STRING_length);
  FIND(ASN1_STRING_get0_data);
  FIND(ASN1_STRING_to_UTF8);
  FIND(CRYPTO_free);
#undef FIND
  find(from, it.SSL_get1_peer_certificate, "SSL_get1_peer_certificate", "SSL_get_peer_certificate");
  return it;
}

}  // namespace

const TlsLibrary& TlsLibrary::get() {
  static const TlsLibrary library = load();
  return library;
}

}  // namespace stoker
