package main

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// authority signs every certificate of the cluster. Client identities follow the names that
// Kubernetes' own RBAC bindings and the NodeRestriction admission expect.
type authority struct {
	cert *x509.Certificate
	pem  []byte
	key  crypto.Signer
}

func pkiPath(name string) string { return statePath("pki", name) }

// identity is a certificate to be issued: client, server or both.
type identity struct {
	file   string
	name   string
	groups []string
	dns    []string
	ips    []string
}

func controlPlaneIdentities() []identity {
	return []identity{
		{file: "admin", name: "torpor-dev-admin", groups: []string{"system:masters"}},
		{file: "kube-controller-manager", name: "system:kube-controller-manager"},
		{file: "kube-scheduler", name: "system:kube-scheduler"},
		{file: "kubelet-client", name: "kube-apiserver-kubelet-client"},
		{file: "kube-proxy", name: "system:kube-proxy"},
		{
			file: "apiserver", name: "kube-apiserver",
			dns: []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc." + clusterDomain},
			ips: []string{"127.0.0.1", machineAddress, apiServiceIP},
		},
	}
}

func (n node) identities() []identity {
	return []identity{
		{file: n.name(), name: "system:node:" + n.name(), groups: []string{"system:nodes"}},
		{file: n.name() + "-server", name: n.name(), dns: []string{n.name()}, ips: []string{n.address()}},
	}
}

// writeKeys makes the keys and certificates that are missing. Those that exist are kept, because
// tokens and certificates in use were signed by them.
func writeKeys() error {
	if err := os.MkdirAll(statePath("pki"), 0o700); err != nil {
		return err
	}
	ca, err := loadAuthority()
	if err != nil {
		return err
	}
	all := controlPlaneIdentities()
	for _, n := range nodes {
		all = append(all, n.identities()...)
	}
	for _, id := range all {
		if fileExists(pkiPath(id.file + ".crt")) {
			continue
		}
		if err := ca.issue(id); err != nil {
			return fmt.Errorf("certificate %s: %w", id.file, err)
		}
	}
	return writeServiceAccountKey()
}

func loadAuthority() (*authority, error) {
	if content, err := os.ReadFile(pkiPath("ca.crt")); err == nil {
		return parseAuthority(content)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "torpor-dev"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(10, 0, 0),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	if err := writeKeyPEM(pkiPath("ca.key"), key); err != nil {
		return nil, err
	}
	content := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := writeFile(pkiPath("ca.crt"), content, 0o644); err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return &authority{cert, content, key}, err
}

func parseAuthority(content []byte) (*authority, error) {
	block, _ := pem.Decode(content)
	keyContent, err := os.ReadFile(pkiPath("ca.key"))
	if err != nil {
		return nil, err
	}
	keyBlock, _ := pem.Decode(keyContent)
	if block == nil || keyBlock == nil {
		return nil, fmt.Errorf("%s is not PEM; run `hack/cluster down` and then `up`", statePath("pki"))
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, err
	}
	key, err := x509.ParseECPrivateKey(keyBlock.Bytes)
	return &authority{cert, content, key}, err
}

func (ca *authority) issue(id identity) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: id.name, Organization: id.groups},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(10, 0, 0),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		DNSNames: id.dns,
	}
	for _, ip := range id.ips {
		template.IPAddresses = append(template.IPAddresses, net.ParseIP(ip))
	}
	if len(id.dns)+len(id.ips) > 0 {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, key.Public(), ca.key)
	if err != nil {
		return err
	}
	if err := writeKeyPEM(pkiPath(id.file+".key"), key); err != nil {
		return err
	}
	return writeFile(pkiPath(id.file+".crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644)
}

// writeServiceAccountKey makes the pair that signs and checks ServiceAccount tokens.
func writeServiceAccountKey() error {
	if fileExists(pkiPath("service-account.pub")) {
		return nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	if err := writeKeyPEM(pkiPath("service-account.key"), key); err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	return writeFile(pkiPath("service-account.pub"), pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}), 0o644)
}

func writeKeyPEM(path string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return writeFile(path, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600)
}

// writeKubeconfig writes a self-contained kubeconfig (keys inside), so that it can be copied
// elsewhere.
func writeKubeconfig(path, file string) error {
	var encoded []any
	encoded = append(encoded, apiserverURL())
	for _, f := range []string{"ca.crt", file + ".crt", file + ".key"} {
		content, err := os.ReadFile(pkiPath(f))
		if err != nil {
			return err
		}
		encoded = append(encoded, base64.StdEncoding.EncodeToString(content))
	}
	content := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: torpor-dev, cluster: {server: "%s", certificate-authority-data: %s}}]
users: [{name: torpor-dev, user: {client-certificate-data: %s, client-key-data: %s}}]
contexts: [{name: torpor-dev, context: {cluster: torpor-dev, user: torpor-dev}}]
current-context: torpor-dev
`, encoded...)
	return writeFile(path, []byte(content), 0o600)
}

// writeFile replaces a file as a whole: a reader, or an `up` after a crash, never sees half of it.
func writeFile(path string, content []byte, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, content) {
		return os.Chmod(path, mode)
	}
	temporary, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(temporary.Name())
	if _, err := temporary.Write(content); err != nil {
		return err
	}
	if err := temporary.Chmod(mode); err != nil {
		return err
	}
	if err := temporary.Close(); err != nil {
		return err
	}
	return os.Rename(temporary.Name(), path)
}

func fileExists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
