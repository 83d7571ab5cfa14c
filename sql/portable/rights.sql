-- ----- the installer's role and tablespace -----

SELECT set_config('role', current_setting('idem_install.role'), true);
