from raycloak_layout import check_siblings

check_siblings()
